"""deterministic: true: a request's logits have the same bits alone, batched and chunked, in float32 and bfloat16."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.model_runner import choose_backend
from nereid.models import layers
from nereid.request import Request, SamplingParams
from nereid.tokenization.tokenizer import Tokenizer
from tests.conftest import spec_bench_prompts
from tests.engine.draws import draws
from tests.engine.tiny import VOCAB, SteppedEngine

WAYS: dict[str, dict[str, object]] = {
    "alone": {"max_num_seqs": 1},
    "batched": {"max_num_seqs": 20},
    "chunked": {"max_num_seqs": 20, "max_num_batched_tokens": 37},
}


@pytest.fixture
def one_thread() -> None:
    """Not here, but all: bits may depend on where a thread's share ends."""


def logits_by_request(
    directory: Path, requests: list[Request], settings: dict[str, object]
) -> dict[int, list[torch.Tensor]]:
    """Of each request, the logits of every position that drew a token, in order."""
    return draws(SteppedEngine(directory, {"deterministic": True, **settings}), requests)


def assert_same_bits(directory: Path, requests: list[Request], settings: dict[str, object]) -> None:
    alone, *others = (logits_by_request(directory, requests, {**settings, **way}) for way in WAYS.values())
    for request in requests:
        assert len(alone[request.request_id]) == request.sampling.max_tokens
        for other in others:
            pairs = zip(alone[request.request_id], other[request.request_id], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"request {request.request_id} differs"


def make_request(index: int, prompt: tuple[int, ...], max_tokens: int = 32) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(index, prompt, sampling, arrival_time=0.0)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "auto"), ("bfloat16", "auto"), ("float32", "fp8_e4m3"), ("bfloat16", "int8")],
)
def test_tiny_logits_have_the_same_bits_whatever_is_beside_them(directory: Path, dtype: str, kv_dtype: str) -> None:
    # A processor without instructions for them takes minutes for what others do in seconds.
    count, max_tokens = (10, 16) if dtype == "float32" else (4, 8)
    rng = random.Random(4)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 90))) for _ in range(count)]
    requests = [make_request(index, prompt, max_tokens) for index, prompt in enumerate(prompts)]
    assert_same_bits(directory, requests, {"dtype": dtype, "kv_dtype": kv_dtype, "block_size": 8, "num_blocks": 800})


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_logits_have_the_same_bits_whatever_is_beside_them(
    smollm2_directory: Path, smollm2_tokenizer: Tokenizer, dtype: str
) -> None:
    prompts = [tuple(smollm2_tokenizer.encode(prompt)) for prompt in spec_bench_prompts(20)]
    requests = [make_request(index, prompt) for index, prompt in enumerate(prompts)]
    assert_same_bits(smollm2_directory, requests, {"dtype": dtype, "num_blocks": 1000})


def test_a_processor_whose_products_vary_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "row_tiles", lambda weight: (16,) if weight.shape[0] < 200 else ())
    with pytest.raises(ConfigError, match="deterministic: got true; allowed on this processor: false"):
        SteppedEngine(directory, {"deterministic": True, "attention_backend": "cpu"})


def test_kernels_cannot_be_deterministic_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="x", attention_backend="triton_lang", deterministic=True)
    with pytest.raises(ConfigError, match="attention_backend: got 'triton_lang' for tensors on the CPU"):
        choose_backend(config, torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="deterministic: got true with attention_backend triton_lang"):
        choose_backend(config, torch.device("cpu"))
