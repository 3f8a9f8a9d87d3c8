"""Beam search finds what transformers' finds, however its beams are computed: chunked, preempted, with few seats."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nereid.request import Branching, Request, SamplingParams
from tests.engine.tiny import EOS, VOCAB, SteppedEngine

BLOCK = 8
STOPS = tuple(sorted(random.Random(3).sample(range(3, VOCAB), 40)))  # so many that beams end at all lengths
Found = list[tuple[list[int], float]]  # tokens and score, the best first


def make_request(branching: Branching, max_tokens: int, prompt_len: int = 21, min_tokens: int = 0) -> Request:
    rng = random.Random(prompt_len)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(prompt_len))
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=STOPS)
    return Request(prompt_len, prompt, sampling, 0.0, branching=branching)


def theirs(model: Any, request: Request) -> Found:
    """What transformers' generate finds. model: a LlamaForCausalLM, whose stubs do not fit it."""
    branching, sampling, prompt = request.branching, request.sampling, request.prompt_token_ids
    stops = (EOS, *sampling.stop_token_ids)
    out = model.generate(
        torch.tensor([prompt]), num_beams=branching.beam_width, num_return_sequences=branching.n, do_sample=False,
        length_penalty=branching.length_penalty, early_stopping=branching.early_stopping, eos_token_id=list(stops),
        max_new_tokens=sampling.max_tokens, min_new_tokens=sampling.min_tokens, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = []
    for tokens, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        output = tokens[len(prompt) :][: sampling.max_tokens]
        ends = [index for index, token in enumerate(output) if token in stops]
        found.append((output[: ends[0] + 1] if ends else output, score))
    return found


def ours(engine: SteppedEngine, request: Request) -> Found:
    """What the engine has found."""
    penalty = request.branching.length_penalty
    hypotheses = engine.found[request.request_id]
    return [(list(h.token_ids), h.total / h.length**penalty) for h in hypotheses]


def check(model: transformers.LlamaForCausalLM, request: Request, engine: SteppedEngine) -> None:
    expected, found = theirs(model, request), ours(engine, request)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_the_search_finds_what_transformers_finds(
    model: transformers.LlamaForCausalLM, directory: Path, width: int, length_penalty: float, early_stopping: bool
) -> None:
    engine = SteppedEngine(directory, {"block_size": BLOCK, "num_blocks": 400})
    branching = Branching(width, width, width, length_penalty, early_stopping)
    requests = [make_request(branching, *how) for how in ((1, 5), (2, 8), (9, 16), (40, 21), (25, 33), (30, 13, 6))]
    engine.run(requests)
    for request in requests:
        check(model, request, engine)
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks


def test_beams_end_at_many_lengths(directory: Path) -> None:
    """So that the test above is one."""
    engine = SteppedEngine(directory, {"block_size": BLOCK, "num_blocks": 400})
    request = make_request(Branching(8, 8, 8, 0.0), 40)
    engine.run([request])
    lengths = {h.length for h in engine.found[request.request_id]}
    assert len(lengths) > 2 and max(lengths) < 40


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"max_num_batched_tokens": 7}, False),
        ({"max_num_batched_tokens": 1}, True),  # one seat, too
        ({"max_num_seqs": 2}, True),
        ({"max_num_seqs": 5}, False),
        ({"num_blocks": 8}, True),
        ({"num_blocks": 9, "max_num_batched_tokens": 13}, True),
        ({"block_size": 1, "num_blocks": 300}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", [True, False])
def test_beams_do_not_depend_on_the_way(
    model: transformers.LlamaForCausalLM, directory: Path, settings: dict[str, object], preempts: bool, cache: bool
) -> None:
    engine = SteppedEngine(directory, {"block_size": BLOCK, **settings})
    branchings = [Branching(4, 4, 4), Branching(3, 3, 3, 2.0, early_stopping=True)]
    requests = [
        replace(make_request(branching, 20, 20 + index), cache=cache) for index, branching in enumerate(branchings)
    ]
    engine.run(requests)
    for request in requests:
        check(model, request, engine)
    assert (engine.scheduler.num_preemptions > 0) == preempts


@pytest.mark.parametrize("step", range(0, 16, 2))
def test_a_preemption_at_any_step_changes_no_beam(
    model: transformers.LlamaForCausalLM, directory: Path, step: int
) -> None:
    engine = SteppedEngine(directory, {"block_size": BLOCK, "max_num_batched_tokens": 11})
    requests = [make_request(Branching(4, 4, 4, 1.5), 15, prompt_len) for prompt_len in (5, 20)]
    for request in requests:
        engine.add(request)
    engine.run_with_preemptions(step)
    assert engine.scheduler.num_preemptions > 0
    for request in requests:
        check(model, request, engine)
