"""Requests of several sequences through the engine with its threads: what is told, in which order, and one end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from nereid.batch import Capacity, DrawFault, GuideMasks, SampledToken, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.engine import Engine
from nereid.errors import ErrorCode
from nereid.guided.compiler import GuideCompiler
from nereid.model_config import ModelConfig
from nereid.request import Branching, FinishReason, Request, RequestOutput, SamplingParams
from nereid.sequences import joined
from nereid.tokenization.tokenizer import Tokenizer
from tests.engine.test_beams import make_request as make_beam_request
from tests.engine.test_beams import theirs
from tests.engine.test_engine import Bench, Outputs

PROMPT = tuple(range(3, 23))


def make_request(
    branching: Branching, deadline_s: float | None = None, request_id: int = 1, **sampling: object
) -> Request:
    params = SamplingParams(**{"temperature": 0.8, "seed": 7, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    now = time.monotonic()
    deadline = None if deadline_s is None else now + deadline_s
    return Request(request_id, PROMPT, params, now, deadline, branching=branching)


class Answers(Bench):
    """A bench that keeps every output."""

    num_asked = 0

    def ask(self, request: Request) -> list[RequestOutput]:
        """All outputs of one request, to its end."""
        self.num_asked += 1
        self.engine.submit(replace(request, request_id=self.num_asked))
        outputs = [self.outputs.next()]
        while not outputs[-1].final:
            outputs.append(self.outputs.next())
        assert {output.request_id for output in outputs} == {self.num_asked}
        return outputs

    def sequences(self, request: Request) -> list[RequestOutput]:
        """The answer, each sequence whole."""
        outputs = self.ask(request)
        assert not any(output.final or output.stats for output in outputs[:-1])
        by_index = [[o for o in outputs if o.sequence_index == index] for index in range(request.branching.n)]
        assert sum(map(len, by_index)) == len(outputs)
        for told in by_index:
            assert [output.finished for output in told] == [False] * (len(told) - 1) + [True]
        return [joined(told) for told in by_index]


@pytest.fixture(scope="module")
def bench(directory: Path) -> Iterator[Answers]:
    bench = Answers(directory, dtype="float32", num_blocks=200)
    yield bench
    bench.wait_until_empty()
    bench.engine.shutdown(0.0)


def test_sequences_are_told_one_beside_the_other_with_one_end(bench: Answers) -> None:
    outputs = bench.ask(make_request(Branching(3, 3), max_tokens=6))
    assert [output.sequence_index for output in outputs[:6]] == [0, 1, 2, 0, 1, 2]
    assert [output.final for output in outputs] == [False] * 17 + [True]
    stats = outputs[-1].stats
    assert stats is not None and (stats.num_prompt_tokens, stats.num_output_tokens) == (20, 18)
    assert stats.first_token_time is not None and stats.last_token_time is not None


def test_the_first_sequence_is_the_answer_of_one_and_a_seed_reproduces_all(bench: Answers) -> None:
    first, again = (bench.sequences(make_request(Branching(4, 4), max_tokens=12)) for _ in range(2))
    (one,) = bench.sequences(make_request(Branching(), max_tokens=12))
    assert [s.token_ids for s in first] == [s.token_ids for s in again] and one.token_ids == first[0].token_ids
    assert len({s.token_ids for s in first}) == 4 and [len(s.text.split()) for s in first] == [12] * 4


def test_each_sequence_ends_by_its_own_stop(bench: Answers) -> None:
    whole = bench.sequences(make_request(Branching(3, 3), max_tokens=20))
    place, stop = next(
        (place, f"w{token}")
        for place, token in enumerate(whole[1].token_ids)
        if place and not any(f"w{token}" in text for text in (whole[0].text, whole[2].text))
    )
    found = bench.sequences(make_request(Branching(3, 3), max_tokens=20, stop=(stop,)))
    reasons = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    assert [s.finish_reason for s in found] == reasons and found[1].stop_reason == stop
    assert [len(s.token_ids) for s in found] == [20, place + 1, 20]
    assert [s.token_ids for s in found] == [s.token_ids[: len(f.token_ids)] for s, f in zip(whole, found, strict=True)]
    eos = bench.sequences(make_request(Branching(3, 3), max_tokens=20, stop_token_ids=(whole[2].token_ids[0],)))
    assert eos[2].stop_reason == whole[2].token_ids[0] and len(eos[2].token_ids) == 1
    assert len(eos[0].token_ids) == 20 and eos[0].finish_reason is FinishReason.LENGTH


def test_every_sequence_has_penalties_and_logprobs_of_its_own(bench: Answers) -> None:
    asked = {"max_tokens": 16, "logprobs": 2, "prompt_logprobs": 0}
    found = bench.sequences(make_request(Branching(3, 3), repetition_penalty=20.0, frequency_penalty=50.0, **asked))
    for sequence in found:
        assert len(set(sequence.token_ids)) == 16, "a token came twice"
        assert [told.token_id for told in sequence.logprobs] == list(sequence.token_ids)
        assert all(len(told.top) == 2 for told in sequence.logprobs)
        assert sequence.cumulative_logprob == pytest.approx(sum(told.logprob for told in sequence.logprobs))
    assert [len(s.prompt_logprobs) for s in found] == [19, 0, 0]
    untold = bench.sequences(make_request(Branching(2, 2), max_tokens=3))
    assert [s.cumulative_logprob for s in untold] == [None, None]


@pytest.mark.parametrize("told", [None, 1])
def test_best_of_tells_the_best_by_cumulative_logprob(bench: Answers, told: int | None) -> None:
    drawn = bench.sequences(make_request(Branching(5, 5), max_tokens=9, logprobs=0, stop_token_ids=(30, 31, 32)))
    best = sorted(drawn, key=lambda s: -(s.cumulative_logprob or 0.0))[:2]
    request = make_request(Branching(2, 5), max_tokens=9, logprobs=told, prompt_logprobs=0, stop_token_ids=(30, 31, 32))
    found = bench.ask(request)
    assert [(o.sequence_index, o.final) for o in found] == [(0, False), (1, True)]
    assert [o.token_ids for o in found] == [o.token_ids for o in best]
    assert [o.cumulative_logprob for o in found] == pytest.approx([o.cumulative_logprob for o in best])
    assert [(o.text, o.finish_reason, o.stop_reason) for o in found] == [
        (o.text, o.finish_reason, o.stop_reason) for o in best
    ]
    assert [len(o.logprobs) for o in found] == [0 if told is None else len(o.token_ids) for o in best]
    assert [len(o.prompt_logprobs) for o in found] == [19, 0]
    stats = found[-1].stats
    assert stats is not None and stats.num_output_tokens == sum(len(o.token_ids) for o in drawn)


def test_ties_go_to_the_lower_index(bench: Answers) -> None:
    """Greedy sequences are equal, so the first ones are told."""
    outputs = bench.ask(make_request(Branching(2, 4), max_tokens=5, temperature=0.0))
    assert outputs[0].token_ids == outputs[1].token_ids and len(outputs) == 2


def test_beams_are_told_at_the_end_as_transformers_finds_them(
    bench: Answers, model: transformers.LlamaForCausalLM
) -> None:
    request = make_beam_request(Branching(3, 3, 4, 1.5), 20)
    request = replace(request, sampling=replace(request.sampling, logprobs=3, prompt_logprobs=1))
    found = bench.ask(replace(request, arrival_time=time.monotonic()))
    expected = theirs(model, request)
    assert [list(o.token_ids) for o in found] == [tokens for tokens, _ in expected]
    assert [(o.sequence_index, o.finished, o.final) for o in found] == [
        (0, True, False), (1, True, False), (2, True, True),
    ]  # fmt: skip
    assert [len(o.prompt_logprobs) for o in found] == [20, 0, 0]
    for output, (tokens, score) in zip(found, expected, strict=True):
        total = output.cumulative_logprob
        assert total is not None and total / len(tokens) ** 1.5 == pytest.approx(score, rel=1e-4)
        assert sum(told.logprob for told in output.logprobs) == pytest.approx(total)
        assert all(
            len(told.top) == 3 and (told.rank > 3 or told.token_id == told.top[told.rank - 1][0])
            for told in output.logprobs
        )
        stopped = output.finish_reason is FinishReason.STOP
        assert len(output.text.split()) == len(tokens) - stopped
        assert output.stop_reason == (tokens[-1] if stopped else None)


def test_what_a_search_tells_of_a_token_is_told_of_it_elsewhere(bench: Answers) -> None:
    request = make_request(Branching(2, 2, 2), max_tokens=1, logprobs=4, temperature=0.0)
    found = bench.ask(request)
    (one,) = bench.sequences(make_request(Branching(), max_tokens=1, logprobs=4, temperature=0.0))
    assert found[0].logprobs == one.logprobs and found[1].logprobs[0].top == one.logprobs[0].top
    assert found[1].logprobs[0].rank == 2


@pytest.mark.parametrize("branching", [Branching(3, 3), Branching(2, 3), Branching(2, 2, 3)], ids=str)
def test_cancelling_ends_all_sequences_once(directory: Path, branching: Branching) -> None:
    bench = Answers(directory, dtype="float32")
    bench.engine.submit(make_request(branching, max_tokens=300))
    bench.engine.submit(make_request(Branching(), request_id=2, max_tokens=300))
    while bench.outputs.next().request_id != 2:
        pass
    bench.engine.cancel(1)
    (end,) = bench.outputs.wait_for(1)
    assert end.failure is not None and end.failure.code is ErrorCode.CANCELLED and end.final
    bench.engine.cancel(2)
    bench.outputs.wait_for(2)
    bench.wait_until_empty()
    bench.engine.shutdown(0.0)


@pytest.mark.parametrize("branching", [Branching(3, 3), Branching(2, 3), Branching(2, 2, 3)], ids=str)
def test_a_deadline_ends_every_sequence_with_what_it_has(directory: Path, branching: Branching) -> None:
    bench = Answers(directory, dtype="float32")
    found = bench.sequences(make_request(branching, deadline_s=0.3, max_tokens=450))
    assert [s.finish_reason for s in found] == [FinishReason.TIMEOUT] * branching.n
    assert all(0 < len(s.token_ids) < 450 and s.text for s in found)
    bench.wait_until_empty()
    bench.engine.shutdown(0.0)


@pytest.mark.parametrize("branching", [Branching(3, 3), Branching(2, 3), Branching(2, 2, 3)], ids=str)
def test_a_deadline_before_the_first_token_still_ends_every_sequence(directory: Path, branching: Branching) -> None:
    bench = Answers(directory, max_num_seqs=1, num_threads=1)
    bench.engine.submit(make_request(Branching(), max_tokens=400))
    bench.outputs.next()
    bench.engine.submit(make_request(branching, deadline_s=0.0, request_id=2, max_tokens=5))
    ends: list[RequestOutput] = []
    while 2 not in bench.outputs.ends:
        ends += [output] if (output := bench.outputs.next()).request_id == 2 else []
    assert [(o.sequence_index, o.finish_reason, o.token_ids) for o in ends] == [
        (index, FinishReason.TIMEOUT, ()) for index in range(branching.n)
    ]
    bench.engine.shutdown(0.0)


@pytest.mark.parametrize("branching", [Branching(3, 3), Branching(2, 2, 3)], ids=str)
def test_a_drain_that_runs_out_of_time_fails_a_request_once(directory: Path, branching: Branching) -> None:
    bench = Answers(directory)
    bench.engine.submit(make_request(branching, max_tokens=450))
    while bench.engine.stats.num_running < 3:
        time.sleep(0.001)
    bench.engine.shutdown(0.05)
    (end,) = bench.outputs.wait_for(1)
    assert end.failure is not None and end.failure.code is ErrorCode.UNAVAILABLE
    assert bench.engine.stats.kv_cache_usage == 0.0


class FaultyExecutor:
    """Draws token 5; of the sequence that came third, nothing from its second row on."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._num_rows = 0

    def start(self) -> Capacity:
        return Capacity(50, 1, 16)

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        self._known += [new.request_id for new in plan.new_requests]
        sampled = []
        for row in plan.scheduled:
            third = self._known.index(row.request_id) == 2
            self._num_rows += third
            fault = DrawFault.NOT_FINITE if third and self._num_rows > 1 else None
            sampled.append(SampledToken(row.request_id, -1 if fault else 5, fault))
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step, tuple(sampled)))
        return future

    def supply_masks(self, masks: GuideMasks) -> None:
        raise AssertionError("no request has a guide")

    def healthy(self) -> bool:
        return True

    def shutdown(self) -> None:
        self._known.clear()


def test_a_fault_in_one_sequence_fails_its_request_once_and_no_other(directory: Path) -> None:
    outputs = Outputs()
    model, tokenizer = ModelConfig.load(directory), Tokenizer(directory)
    compiler = GuideCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
    engine = Engine(EngineConfig(model="x"), model, tokenizer, FaultyExecutor(), compiler, outputs.emit)
    engine.start()
    engine.submit(make_request(Branching(4, 4), max_tokens=9))
    engine.submit(make_request(Branching(), request_id=2, max_tokens=9))
    failed, other = outputs.wait_for(1, 2)
    assert failed.failure is not None and failed.failure.code is ErrorCode.INTERNAL and failed.final
    assert other.finish_reason is FinishReason.LENGTH and outputs.counts[2] == 9
    assert engine.alive
    engine.shutdown(1.0)
