"""The n sequences of a request on a tiny random Llama: each is what it would be alone, and the prompt is computed once.

Reference: transformers' own dense pass, with the noise of each sequence. Every unused block is full of NaN.
"""

from __future__ import annotations

import random
import unittest.mock
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import transformers

from nereid.batch import SchedulerOutput, StepResult
from nereid.request import Branching, Request, SamplingParams
from tests.engine.tiny import VOCAB, IdentityRule, SteppedEngine, reference_logits

BLOCK = 8


def make_request(request_id: int, prompt_len: int, n: int, max_tokens: int = 20, *, cache: bool = True) -> Request:
    rng = random.Random(prompt_len)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(prompt_len))
    sampling = SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=True, seed=prompt_len)
    return Request(request_id, prompt, sampling, 0.0, cache=cache, branching=Branching(n, n))


@dataclass
class RecordingEngine(SteppedEngine):
    """Keeps the plans that it computes."""

    plans: list[SchedulerOutput] = field(default_factory=list)

    def compute(self, plan: SchedulerOutput) -> StepResult:
        self.plans.append(plan)
        return super().compute(plan)


class Sequences:
    """Requests on a stepped engine, and their tokens by sequence."""

    def __init__(self, directory: Path, requests: list[Request], settings: dict[str, object]) -> None:
        self.engine = RecordingEngine(directory, {"block_size": BLOCK, **settings})
        self.ids = {r.request_id: [state.request_id for state in self.engine.add(r)] for r in requests}
        self.requests = requests

    @property
    def plans(self) -> list[SchedulerOutput]:
        return self.engine.plans

    def run(self) -> Sequences:
        self.engine.run([])
        assert self.engine.kv_cache.num_free_blocks == self.engine.kv_cache.num_blocks
        return self

    def tokens(self, request: Request) -> list[list[int]]:
        return [self.engine.tokens[sequence_id] for sequence_id in self.ids[request.request_id]]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(plan.num_scheduled_tokens for plan in self.plans)

    def check(self, model: transformers.LlamaForCausalLM) -> None:
        rule = IdentityRule()
        for request in self.requests:
            prompt = request.prompt_token_ids
            for index, tokens in enumerate(self.tokens(request)):
                assert len(tokens) == request.sampling.max_tokens
                rule.check(reference_logits(model, prompt, tokens), tokens, len(prompt), request.sampling, index)
        rule.conclude()


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 7}, False),
        ({"max_num_batched_tokens": 1}, False),
        ({"max_num_seqs": 2}, False),
        ({"num_blocks": 14}, True),
        ({"num_blocks": 9, "max_num_batched_tokens": 13}, True),
        ({"block_size": 1, "num_blocks": 400}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", [True, False])
def test_each_sequence_is_its_own_whatever_the_way(
    model: transformers.LlamaForCausalLM, directory: Path, settings: dict[str, object], preempts: bool, cache: bool
) -> None:
    lengths = [(1, 2), (7, 3), (8, 4), (9, 2), (23, 1), (25, 5)]
    requests = [make_request(index, *how, cache=cache) for index, how in enumerate(lengths)]
    sequences = Sequences(directory, requests, settings).run()
    sequences.check(model)
    assert (sequences.engine.scheduler.num_preemptions > 0) == preempts


@pytest.mark.parametrize("step", range(0, 20, 3))
@pytest.mark.parametrize("cache", [True, False])
def test_a_preemption_at_any_step_changes_no_sequence(
    model: transformers.LlamaForCausalLM, directory: Path, step: int, cache: bool
) -> None:
    requests = [make_request(index, *how, cache=cache) for index, how in enumerate([(5, 2), (20, 3), (16, 2)])]
    sequences = Sequences(directory, requests, {"max_num_batched_tokens": 11})
    scheduler, count = sequences.engine.scheduler, 0
    while scheduler.has_work:
        if count >= step and (count - step) % 5 == 0 and scheduler.num_running:
            scheduler.preempt_worst()
        sequences.engine.step()
        count += 1
    assert scheduler.num_preemptions > 0
    sequences.check(model)


def test_the_first_sequence_is_the_answer_of_one_and_all_reproduce(directory: Path) -> None:
    several, one = make_request(1, 21, 4), make_request(1, 21, 1)
    first = Sequences(directory, [several], {}).run().tokens(several)
    again = Sequences(directory, [several], {"max_num_seqs": 2}).run().tokens(several)
    assert first == again and Sequences(directory, [one], {}).run().tokens(one) == first[:1]
    assert len({tuple(tokens) for tokens in first}) == 4


@pytest.mark.parametrize("prompt_len", range(1, 3 * BLOCK + 2))
@pytest.mark.parametrize("budget", [6, 8, 64])
def test_the_prompt_is_computed_once(directory: Path, prompt_len: int, budget: int) -> None:
    """Also where its end uses a step's budget up; and without the prefix cache's help."""
    request = make_request(1, prompt_len, 5, max_tokens=3, cache=False)
    sequences = Sequences(directory, [request], {"max_num_batched_tokens": budget}).run()
    assert sequences.num_scheduled_tokens == prompt_len + 5 * 2
    firsts = [new.request_id for plan in sequences.plans if plan.new_requests for new in plan.new_requests]
    assert firsts == sequences.ids[1]


def bits(directory: Path, requests: list[Request], settings: dict[str, object]) -> dict[tuple[int, int], list[bytes]]:
    """Of each sequence, the bits of the logits of every position that drew a token."""
    sequences = Sequences(directory, requests, {"deterministic": True, **settings})
    place = {i: (request_id, index) for request_id, ids in sequences.ids.items() for index, i in enumerate(ids)}
    seen: dict[tuple[int, int], list[bytes]] = {where: [] for where in place.values()}
    runner_model = sequences.engine.runner.model
    logits_of = runner_model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        rows = [row for row in sequences.plans[-1].scheduled if row.samples]
        for row, row_logits in zip(rows, logits, strict=True):
            seen[place[row.request_id]].append(row_logits.numpy().tobytes())
        return logits

    with unittest.mock.patch.object(runner_model, "logits", record):
        sequences.run()
    return seen


@pytest.mark.parametrize("cache", [True, False])
def test_deterministic_sequences_have_the_bits_of_solo_runs(directory: Path, cache: bool) -> None:
    requests = [make_request(1, 21, 4, cache=cache), make_request(2, 16, 3, cache=cache)]
    alone = {**bits(directory, requests[:1], {"max_num_seqs": 1}), **bits(directory, requests[1:], {"max_num_seqs": 1})}
    ways: list[dict[str, object]] = [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 3}, {"num_blocks": 12}]
    for way in ways:
        assert bits(directory, requests, way) == alone
    (one,) = bits(directory, [replace(requests[0], branching=Branching())], {}).values()
    assert one == alone[1, 0]


def test_logits_that_are_not_finite_fail_every_fork(directory: Path) -> None:
    request = make_request(1, 20, 3)
    engine = SteppedEngine(directory, {"block_size": BLOCK, "max_num_batched_tokens": 16})
    engine.add(request)
    engine.step()
    (leader,) = engine.kv_cache.tables.values()
    engine.runner.kv_cache.pages[leader[0][0]] = 255
    plan = engine.scheduler.schedule()
    advances = engine.scheduler.update(plan, engine.compute(plan))
    assert [row.forked_from for row in plan.scheduled] == [None, 1, 1]
    assert len(advances) == 3 and all(advance.fault for advance in advances)
