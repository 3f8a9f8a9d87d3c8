"""SmolLM2 in float32, greedy: transformers' own tokens, alone and sixteen at a time, by the identity rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nereid.batch import LoadBlock, SwapIn
from nereid.request import Request, SamplingParams
from nereid.tokenization.tokenizer import Tokenizer
from tests.conftest import spec_bench_prompts
from tests.engine.logprobs import TellingEngine, check_logprobs
from tests.engine.tiny import IdentityRule, SteppedEngine


@pytest.fixture(scope="module")
def reference(smollm2_directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32)


def generate(model: Any, prompt: tuple[int, ...], count: int) -> torch.Tensor:
    """The logits [count, vocabulary] by which transformers' own loop chose each of its tokens."""
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            min_new_tokens=count, max_new_tokens=count, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
    return torch.cat(result.logits)


def compare(directory: Path, model: Any, num_prompts: int, num_tokens: int) -> None:
    tokenizer = Tokenizer(directory)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = spec_bench_prompts(num_prompts)
    requests = [Request(i, tokenizer.encode(prompt), sampling, 0.0) for i, prompt in enumerate(prompts)]
    expected = [generate(model, request.prompt_token_ids, num_tokens) for request in requests]
    for max_num_seqs in (1, 16):
        engine = SteppedEngine(directory, {"max_num_seqs": max_num_seqs, "num_blocks": 1000})
        tokens = engine.run(requests)
        rule = IdentityRule()
        for request, logits in zip(requests, expected, strict=True):
            rule.check(logits, tokens[request.request_id], len(request.prompt_token_ids), sampling)
        print(f"{max_num_seqs} at a time: ", end="")
        rule.conclude()


def test_tokens_equal_transformers(smollm2_directory: Path, reference: Any) -> None:
    compare(smollm2_directory, reference, num_prompts=8, num_tokens=24)


def test_logprobs_equal_transformers(smollm2_directory: Path, reference: Any) -> None:
    text = "The cat sat on the mat, and the dog lay beside it. " * 6
    prompt = Tokenizer(smollm2_directory).encode(text)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    engine = TellingEngine(smollm2_directory, {"max_num_batched_tokens": 50, "num_blocks": 100})
    tokens = engine.run([Request(0, prompt, sampling, 0.0)])[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, :-1]
    told = [engine.prompts[0][i] for i in range(1, len(prompt))] + engine.outputs[0]
    check_logprobs(told, [*prompt[1:], *tokens], logits, count=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_equal_transformers_on_fifty_prompts(smollm2_directory: Path, reference: Any) -> None:
    compare(smollm2_directory, reference, num_prompts=50, num_tokens=64)


@pytest.mark.slow
def test_tokens_do_not_depend_on_what_the_kv_cache_held(
    smollm2_directory: Path, smollm2_tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    """Cached, chunked, recomputed, swapped and from the host, from disk, and from disk in another process."""
    prompts = [smollm2_tokenizer.encode(prompt)[:120] for prompt in spec_bench_prompts(10)]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [generate(reference, prompt, sampling.max_tokens) for prompt in prompts]

    def run(rounds: int = 1, **settings: object) -> SteppedEngine:
        engine = SteppedEngine(smollm2_directory, {"max_num_seqs": 8, "num_blocks": 1000, **settings})
        for first in range(0, 100 * rounds, 100):
            tokens = engine.run([Request(first + i, prompt, sampling, 0.0) for i, prompt in enumerate(prompts)])
            rule = IdentityRule()
            for i, logits in enumerate(expected):
                rule.check(logits, tokens[first + i], len(prompts[i]), sampling)
            rule.conclude()
        return engine

    run(2)
    run(max_num_batched_tokens=37)
    assert run(num_blocks=22, host_cache_bytes=0).scheduler.num_preemptions
    assert run(3, num_blocks=22).ops[SwapIn]
    on_disk: dict[str, Any] = {"disk_cache_dir": str(tmp_path), "host_cache_bytes": 0}
    engine = run(2, num_blocks=22, **on_disk)
    engine.runner.close()
    assert engine.ops[LoadBlock]
    assert run(**on_disk).ops[LoadBlock]
