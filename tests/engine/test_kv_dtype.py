"""A quantised KV cache in the engine: its error is that of the format, with keys and values of any size.

The definition is transformers' model in float64 whose attention rounds keys and values as the format says. An engine
may be off by twice what the definition is.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nereid.models import eager
from nereid.request import Request, SamplingParams
from nereid_kernels.reference.kv_write import dequantise, quantise, token_scale
from tests.benchmarks.perplexity import fixed_text, scores
from tests.engine.test_deterministic import logits_by_request
from tests.engine.tiny import VOCAB
from tests.kernels.bounds import assert_as_good_as_plain

QUANTISED = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
K_FACTOR, V_FACTOR = 0.01, 30.0
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {"max_num_seqs": 20},
    "chunked": {"max_num_seqs": 20, "max_num_batched_tokens": 7},
    "preempted": {"max_num_batched_tokens": 13, "num_blocks": 16},
}


LENGTHS = (1, 2, 5, 7, 8, 9, 16, 31, 40, 64, 77, 100)


def make_requests(lengths: tuple[int, ...]) -> list[Request]:
    rng = random.Random(3)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(length)) for length in lengths]
    return [Request(index, prompt, sampling, arrival_time=0.0) for index, prompt in enumerate(prompts)]


def engine_logits(directory: Path, kv_dtype: str, lengths: tuple[int, ...] = LENGTHS, **settings: object) -> Tensor:
    """By which the first token after prompts of such lengths is drawn, [prompts, vocabulary]."""
    requests = make_requests(lengths)
    fixed: dict[str, object] = {"kv_dtype": kv_dtype, "block_size": 8, "deterministic": False}
    found = logits_by_request(directory, requests, {**fixed, **settings})
    return torch.stack([found[request.request_id][0] for request in requests])


def restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [..., head_dim] float64, as a cache of `dtype` gives it back."""
    scale = token_scale(x, dtype)[..., None]
    return dequantise(quantise(x, scale, dtype), scale, x.dtype)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of one sequence as transformers calls it, [1, heads, tokens, head_dim] each.

    options["kv_dtype"]: what keys and values are rounded to; None: nothing.
    """
    if dtype := options["kv_dtype"]:
        key, value = (restored(x, dtype) for x in (key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = scaling * query @ key.transpose(-1, -2)
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def defined_logits(directory: Path, kv_dtype: str, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """What `engine_logits` approximates, in float64; "auto": nothing is rounded."""
    name = f"kv_{kv_dtype}"
    transformers.AttentionInterface.register(name, partial(attention, kv_dtype=QUANTISED.get(kv_dtype)))
    model: Any = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation=name)
    with torch.inference_mode():
        logits = [model(torch.tensor([request.prompt_token_ids])).logits[0, -1] for request in make_requests(lengths)]
    return torch.stack(logits)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory, model: transformers.LlamaForCausalLM, directory: Path) -> Path:
    """The tiny model, but its keys are a hundredth and its values thirtyfold; queries and outputs make up for it."""
    folder = tmp_path_factory.mktemp("uneven")
    uneven: Any = transformers.LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for layer in uneven.model.layers:
            layer.self_attn.k_proj.weight.mul_(K_FACTOR)
            layer.self_attn.q_proj.weight.div_(K_FACTOR)
            layer.self_attn.v_proj.weight.mul_(V_FACTOR)
            layer.self_attn.o_proj.weight.div_(V_FACTOR)
    uneven.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    return folder


def check_error(directory: Path, kv_dtype: str, lengths: tuple[int, ...] = LENGTHS, **settings: object) -> None:
    exact, defined = (defined_logits(directory, name, lengths) for name in ("auto", kv_dtype))
    assert_as_good_as_plain(engine_logits(directory, kv_dtype, lengths, **settings), exact, defined)


@pytest.mark.parametrize("attention_backend", ["auto", "cpu"])
@pytest.mark.parametrize("kv_dtype", list(QUANTISED))
def test_error_is_that_of_the_format(directory: Path, kv_dtype: str, attention_backend: str) -> None:
    check_error(directory, kv_dtype, attention_backend=attention_backend)


@pytest.mark.parametrize("attention_backend", ["auto", "cpu"])
@pytest.mark.parametrize("kv_dtype", list(QUANTISED))
def test_small_keys_and_large_values_are_as_good(uneven: Path, kv_dtype: str, attention_backend: str) -> None:
    check_error(uneven, kv_dtype, attention_backend=attention_backend)


def ones_like(scale: Tensor) -> Tensor:
    """As int32 they have an offset of 0."""
    return torch.ones(len(scale), scale.stride(0)).view(scale.dtype).as_strided(scale.shape, scale.stride())


def without_offset(scale: Tensor) -> Tensor:
    return ones_like(scale).copy_(scale & -0x10000)


def one(_: Tensor) -> Tensor:
    return torch.ones(1)


Loss = tuple[tuple[str, ...], tuple[str, ...], Callable[[Tensor], Tensor]]
"""In which of the model's operations which scales are replaced, and by what."""
LOSSES: dict[str, Loss] = {
    "keys' while reading": (("paged_attention",), ("k_scale",), ones_like),
    "values' while reading": (("paged_attention",), ("v_scale",), ones_like),
    "all": (("paged_attention", "qk_norm_rope_kv_write"), ("k_scale", "v_scale"), one),
}


def check_loss(directory: Path, kv_dtype: str, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    operations, names, replacement = loss

    def without(operation: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        return operation(*arguments, **{**options, **{name: replacement(options[name]) for name in names}})

    for name in operations:
        monkeypatch.setattr(eager, name, partial(without, getattr(eager, name)))
    with pytest.raises(AssertionError, match="error .*, allowed"):
        check_error(directory, kv_dtype, attention_backend="cpu")


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("kv_dtype", list(QUANTISED))
def test_missing_scales_break_the_bound(
    uneven: Path, kv_dtype: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_loss(uneven, kv_dtype, LOSSES[loss], monkeypatch)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_missing_offsets_break_the_bound(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_loss(directory, "int8", (("paged_attention",), (name,), without_offset), monkeypatch)


@pytest.mark.parametrize("kv_dtype", list(QUANTISED))
def test_ways_differ_by_less_than_the_format_errs(directory: Path, kv_dtype: str) -> None:
    """They may: a number between two steps of the format is rounded to either by a difference in its last bit."""
    exact, defined = defined_logits(directory, "auto"), defined_logits(directory, kv_dtype)
    usual = (defined - exact).square().mean().sqrt()
    for settings in WAYS.values():
        assert (engine_logits(directory, kv_dtype, LENGTHS, **settings) - defined).abs().max() < usual


def test_sizes_are_logged_at_load(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nereid.model_runner")
    engine_logits(directory, "int8", num_blocks=50)
    # 3 layers, keys and values, 2 heads, 10 numbers and a scale, 8 tokens a block; and up to 64 bytes
    assert (
        "50 blocks of 1600 bytes by num_blocks; torch.int8, 200 bytes a token, 1600 a block; 2.40 times" in caplog.text
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_of_smollm2_rises_little(smollm2_directory: Path, dtype: str) -> None:
    plain, fp8, int8 = scores(smollm2_directory, fixed_text(smollm2_directory), dtype)
    print(plain, fp8, int8, sep="\n")
    assert plain.tokens >= 20_000 and (plain.kv_dtype, fp8.kv_dtype, int8.kv_dtype) == ("auto", "fp8_e4m3", "int8")
    assert int8.rise < 0.1
    assert fp8.rise < 1.0
