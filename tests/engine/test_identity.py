"""The identity rule on a tiny random Llama: a request's tokens are its own, whatever happens around it.

Reference: transformers' own dense pass. Every unused block is full of NaN.
"""

from __future__ import annotations

import random
import unittest.mock
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from nereid.errors import InvalidRequestError
from nereid.request import Request, SamplingParams
from tests.conftest import TOLERANCES
from tests.engine.tiny import NAN_BYTE, VOCAB, IdentityRule, SteppedEngine, reference_logits

BLOCK = 8


def make_requests(lengths: list[int], max_tokens: int, temperature: float = 0.0, salts: str = "a") -> list[Request]:
    """salts: a tenant for each letter, in turns."""
    rng = random.Random(9)
    return [
        Request(
            index,
            tuple(rng.randrange(3, VOCAB) for _ in range(length)),
            SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=index),
            arrival_time=0.0,
            cache_salt=salts[index % len(salts)],
        )
        for index, length in enumerate(lengths)
    ]


def check(
    model: transformers.PreTrainedModel, requests: list[Request], tokens: dict[int, list[int]], num_sink_tokens: int = 0
) -> None:
    """Against transformers.  num_sink_tokens: as in `reference_logits`."""
    rule = IdentityRule()
    for request in requests:
        drawn = tokens[request.request_id]
        assert len(drawn) == request.sampling.max_tokens
        logits = reference_logits(model, request.prompt_token_ids, drawn, num_sink_tokens)
        rule.check(logits, drawn, len(request.prompt_token_ids), request.sampling)
    rule.conclude()


def test_paged_equals_dense_at_every_length_around_block_edges(
    model: transformers.LlamaForCausalLM, directory: Path
) -> None:
    requests = make_requests(list(range(1, 4 * BLOCK + 1)), max_tokens=2 * BLOCK + 1)
    engine = SteppedEngine(directory, {"block_size": BLOCK, "num_blocks": 400})
    check(model, requests, engine.run(requests))


@pytest.mark.parametrize("limit", [512, 256])
def test_up_to_the_last_position_of_the_model_or_the_pool(
    model: transformers.LlamaForCausalLM, directory: Path, limit: int
) -> None:
    """The model's length is 512. What is as long as that allows runs in a pool that holds no token more."""
    longest, long, short, too_long = make_requests([limit - 1, limit - 2, 5, limit], max_tokens=2)
    engine = SteppedEngine(directory, {"block_size": BLOCK, "num_blocks": 1 + limit // BLOCK})
    with pytest.raises(InvalidRequestError, match=f"allowed: at most {limit - 1} tokens"):
        engine.add(too_long)
    tokens = engine.run([longest, long, short])
    cut = replace(longest, sampling=replace(longest.sampling, max_tokens=1))
    check(model, [cut, long, short], tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},  # alone
        {"max_num_seqs": 16},  # batched
        {"max_num_batched_tokens": 7},  # chunked
        {"max_num_batched_tokens": 1},  # a token at a time
        {"num_blocks": 14, "host_cache_bytes": 0},  # preempted and recomputed
        {"num_blocks": 14, "host_cache_bytes": 0, "max_num_batched_tokens": 13},  # in the middle of chunks
        {"num_blocks": 14},  # preempted and swapped
        {"num_blocks": 14, "max_num_batched_tokens": 13},
        {"block_size": 1, "num_blocks": 600},
        {"block_size": 256, "num_blocks": 20},
        {"attention_backend": "cpu"},  # PyTorch in the place of the native library
        {"num_blocks": 14, "max_num_batched_tokens": 13, "attention_backend": "cpu"},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_way(
    model: transformers.LlamaForCausalLM, directory: Path, settings: dict[str, object], temperature: float
) -> None:
    requests = make_requests([1, 7, 8, 9, 23, 40, 16, 31], max_tokens=40, temperature=temperature)
    engine = SteppedEngine(directory, {"block_size": BLOCK, **settings})
    check(model, requests, engine.run(requests))
    assert (engine.scheduler.num_preemptions > 0) == (settings.get("num_blocks") == 14)


@pytest.mark.parametrize("step", range(0, 24, 3))
def test_a_preemption_at_any_step_changes_nothing(
    model: transformers.LlamaForCausalLM, directory: Path, step: int
) -> None:
    requests = make_requests([5, 20, 9], max_tokens=20, temperature=0.9)
    engine = SteppedEngine(directory, {"block_size": BLOCK, "max_num_batched_tokens": 11})
    for request in requests:
        engine.scheduler.add(request)
    engine.run_with_preemptions(step)
    assert engine.scheduler.num_preemptions > 0
    check(model, requests, engine.tokens)


@pytest.mark.parametrize("settings", [{"max_num_seqs": 4}, {"num_blocks": 14}], ids=str)
def test_seats_and_blocks_that_other_tenants_claim_change_nothing(
    model: transformers.LlamaForCausalLM, directory: Path, settings: dict[str, object]
) -> None:
    flood, others = make_requests([20] * 6, 30, 0.9), make_requests([5, 20, 9], 20, 0.9, salts="bc")
    others = [replace(request, request_id=100 + request.request_id) for request in others]
    engine = SteppedEngine(directory, {"block_size": BLOCK, "max_num_batched_tokens": 32, **settings})
    for request in flood:
        engine.scheduler.add(request)
    for _ in range(6):
        engine.step()
    before = engine.scheduler.num_preemptions
    tokens = engine.run(others)
    assert engine.scheduler.num_preemptions > before
    check(model, [*flood, *others], tokens)


def test_nan_logits_end_that_request_alone(model: transformers.LlamaForCausalLM, directory: Path) -> None:
    requests = make_requests([5, 6, 7], max_tokens=12)
    engine = SteppedEngine(directory, {"block_size": BLOCK})
    for request in requests:
        engine.scheduler.add(request)
    engine.step()
    victim_block = engine.kv_cache.tables[1][0][0]
    engine.runner.kv_cache.pages[victim_block] = NAN_BYTE
    plan = engine.scheduler.schedule()
    advances = engine.scheduler.update(plan, engine.compute(plan))
    assert [advance.fault is None for advance in advances] == [True, False, True]
    for advance in advances:
        if advance.fault:
            engine.scheduler.finish(advance.state)
        else:
            engine.tokens[advance.state.request_id].append(advance.token_id)
    while engine.scheduler.has_work:
        engine.step()
    check(model, [requests[0], requests[2]], engine.tokens)


def logits_of(directory: Path, request: Request, dtype: str) -> torch.Tensor:
    """The logits [1, vocabulary] by which the engine draws a request's first token."""
    engine = SteppedEngine(directory, {"block_size": BLOCK, "dtype": dtype})
    seen: list[torch.Tensor] = []
    logits = engine.runner.model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    with unittest.mock.patch.object(engine.runner.model, "logits", record):
        engine.run([request])
    return seen[0]


def test_logits_equal_transformers(model: transformers.LlamaForCausalLM, directory: Path) -> None:
    (request,) = make_requests([50], max_tokens=1)
    expected = reference_logits(model, request.prompt_token_ids, [0])
    bound = TOLERANCES["logits_float32"] * float(expected.abs().max())
    torch.testing.assert_close(logits_of(directory, request, "float32"), expected, rtol=0, atol=bound)


def test_bfloat16_is_as_close_as_transformers_own_bfloat16(
    model: transformers.LlamaForCausalLM, directory: Path
) -> None:
    (request,) = make_requests([50], max_tokens=1)
    expected = reference_logits(model, request.prompt_token_ids, [0])
    half: transformers.LlamaForCausalLM = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    theirs = (reference_logits(half, request.prompt_token_ids, [0]).float() - expected).abs().max()
    ours = (logits_of(directory, request, "bfloat16") - expected).abs().max()
    assert float(ours) <= 2 * float(theirs)
