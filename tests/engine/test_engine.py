"""The engine with its threads, on the tiny Llama: every request ends exactly once, on every path."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from nereid.batch import Capacity, GuideMasks, SchedulerOutput, StepResult
from nereid.build import build_engine
from nereid.config import EngineConfig
from nereid.engine import Engine
from nereid.errors import ErrorCode, ExecutorError
from nereid.guided.compiler import GuideCompiler
from nereid.model_config import ModelConfig
from nereid.request import FinishReason, Request, RequestOutput, SamplingParams
from nereid.tokenization.tokenizer import Tokenizer

WAIT_S = 30.0


class Outputs:
    """Collects what an engine emits; fails the test where a request gets anything after its end."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.ends: dict[int, RequestOutput] = {}
        self.texts: dict[int, str] = {}
        self.counts: dict[int, int] = {}

    def emit(self, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            self.queue.put(output)

    def next(self) -> RequestOutput:
        output = self.queue.get(timeout=WAIT_S)
        assert output.request_id not in self.ends, "an output after the end"
        self.texts[output.request_id] = self.texts.get(output.request_id, "") + output.text
        self.counts[output.request_id] = self.counts.get(output.request_id, 0) + len(output.token_ids)
        if output.final:
            self.ends[output.request_id] = output
        return output

    def wait_for(self, *request_ids: int) -> list[RequestOutput]:
        while not set(request_ids) <= set(self.ends):
            self.next()
        return [self.ends[request_id] for request_id in request_ids]


class Bench:
    """An engine and what it emits."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.outputs = Outputs()
        config = EngineConfig.from_mapping({"model": str(directory), "num_blocks": 60, **settings})
        self.engine = build_engine(config, directory, self.outputs.emit).engine

    def submit(
        self,
        request_id: int,
        deadline_s: float | None = None,
        prompt_len: int = 5,
        priority: int = 0,
        salt: str = "",
        **sampling: object,
    ) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        now = time.monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        prompt = tuple(range(3, 3 + prompt_len))
        self.engine.submit(Request(request_id, prompt, params, now, deadline, priority, cache_salt=salt))

    def wait_until_empty(self) -> None:
        end = time.monotonic() + WAIT_S
        while self.engine.stats.kv_cache_usage > 0 and time.monotonic() < end:
            time.sleep(0.01)
        stats = self.engine.stats
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


@pytest.fixture
def bench(directory: Path) -> Iterator[Bench]:
    bench = Bench(directory)
    yield bench
    bench.engine.shutdown(0.0)


def test_a_request_gets_its_text_and_one_end(bench: Bench) -> None:
    bench.submit(1, max_tokens=6)
    (end,) = bench.outputs.wait_for(1)
    assert end.finish_reason is FinishReason.LENGTH and bench.outputs.counts[1] == 6
    assert len(bench.outputs.texts[1].split()) == 6
    bench.wait_until_empty()


def test_a_refused_request_ends_alone(bench: Bench) -> None:
    bench.submit(1, max_tokens=4)
    bench.submit(2, prompt_len=250, max_tokens=4)
    bench.submit(3, prompt_len=0)
    bench.engine.submit(Request(4, tuple(range(3, 4)) * 600, SamplingParams(), time.monotonic()))
    ends = bench.outputs.wait_for(1, 2, 3, 4)
    assert [end.failure.code if end.failure else end.finish_reason for end in ends] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.INVALID_ARGUMENT,
    ]
    bench.wait_until_empty()


def test_cancelling_frees_the_blocks_and_says_so(bench: Bench) -> None:
    bench.submit(1, max_tokens=400)
    bench.outputs.next()
    bench.engine.cancel(1)
    bench.engine.cancel(1)
    bench.engine.cancel(99)
    (end,) = bench.outputs.wait_for(1)
    assert end.failure is not None and end.failure.code is ErrorCode.CANCELLED
    bench.wait_until_empty()


def test_a_deadline_ends_a_request_with_what_it_has(bench: Bench) -> None:
    bench.submit(1, deadline_s=0.15, max_tokens=490)
    (end,) = bench.outputs.wait_for(1)
    assert end.finish_reason is FinishReason.TIMEOUT and 0 < bench.outputs.counts[1] < 490
    bench.wait_until_empty()


def test_a_request_that_waits_too_long_is_refused(directory: Path) -> None:
    bench = Bench(directory, max_num_seqs=1, queue_timeout_ms=50)
    bench.submit(1, max_tokens=400)
    bench.outputs.next()
    bench.submit(2, max_tokens=4)
    (end,) = bench.outputs.wait_for(2)
    assert end.failure is not None and end.failure.code is ErrorCode.UNAVAILABLE
    assert "queue_timeout_ms" in end.failure.message
    bench.engine.shutdown(0.0)


def test_the_queue_has_a_limit(directory: Path) -> None:
    bench = Bench(directory, max_num_seqs=1, max_queue_size=2)
    bench.submit(1, max_tokens=300)
    bench.outputs.next()
    for request_id in range(2, 12):
        bench.submit(request_id, max_tokens=2)
    ends = bench.outputs.wait_for(*range(1, 12))
    refused = [end for end in ends if end.failure]
    assert all(end.failure.code is ErrorCode.UNAVAILABLE for end in refused if end.failure)
    assert len(refused) >= 1 and ends[0].finish_reason is FinishReason.LENGTH
    bench.wait_until_empty()
    bench.engine.shutdown(0.0)


def test_a_full_queue_takes_another_tenants_request_in_stead_of_the_latest(directory: Path) -> None:
    bench = Bench(directory, max_num_seqs=1, max_queue_size=2, num_threads=1)
    bench.submit(1, max_tokens=490, salt="flood")
    bench.outputs.next()
    for request_id in (2, 3):
        bench.submit(request_id, max_tokens=2, salt="flood")
    bench.submit(4, max_tokens=2, salt="other")
    (refused,) = bench.outputs.wait_for(3)
    assert refused.failure is not None and refused.failure.code is ErrorCode.UNAVAILABLE
    assert "max_queue_size 2" in refused.failure.message and "cache_salt" in refused.failure.message
    assert not bench.outputs.ends.keys() - {3}
    bench.engine.cancel(1)
    assert [end.failure for end in bench.outputs.wait_for(2, 4)] == [None, None]
    bench.wait_until_empty()
    bench.engine.shutdown(0.0)


def test_draining_finishes_what_runs_and_refuses_what_comes(bench: Bench) -> None:
    bench.submit(1, max_tokens=100)
    bench.outputs.next()
    bench.engine.drain(WAIT_S)
    bench.submit(2, max_tokens=4)
    first, second = bench.outputs.wait_for(1, 2)
    assert first.finish_reason is FinishReason.LENGTH
    assert second.failure is not None and second.failure.code is ErrorCode.UNAVAILABLE
    bench.engine.shutdown(1.0)
    bench.submit(3)
    (third,) = bench.outputs.wait_for(3)
    assert third.failure is not None and third.failure.code is ErrorCode.UNAVAILABLE


def test_a_drain_that_runs_out_of_time_ends_what_is_left(bench: Bench) -> None:
    bench.submit(1, max_tokens=400)
    bench.submit(2, max_tokens=400)
    bench.outputs.next()
    bench.engine.shutdown(0.05)
    for end in bench.outputs.wait_for(1, 2):
        assert end.failure is not None and end.failure.code is ErrorCode.UNAVAILABLE
    assert bench.engine.stats.kv_cache_usage == 0.0


def test_random_load_with_cancellations_ends_every_request_once(directory: Path) -> None:
    rng = random.Random(3)
    bench = Bench(directory, block_size=4, num_blocks=60, max_num_batched_tokens=32, max_num_seqs=12)
    for request_id in range(150):
        bench.submit(
            request_id,
            prompt_len=rng.randrange(1, 60),
            priority=rng.randrange(-100, 101),
            salt=rng.choice("abc"),
            max_tokens=rng.randrange(1, 40),
        )
        if rng.random() < 0.4:
            bench.engine.cancel(rng.randrange(request_id + 1))
        if rng.random() < 0.1:
            time.sleep(0.01)
    ends = bench.outputs.wait_for(*range(150))
    assert {end.failure.code for end in ends if end.failure} <= {ErrorCode.CANCELLED}
    bench.wait_until_empty()
    assert bench.engine.alive
    bench.engine.shutdown(0.0)


class BrokenExecutor:
    """Fails, or hangs, at its second step; the first takes `first_step_s`."""

    def __init__(self, *, hang: bool, first_step_s: float = 0.0) -> None:
        self._hang = hang
        self._first_step_s = first_step_s
        self._steps = 0
        self._failed = False

    def start(self) -> Capacity:
        return Capacity(50, 1, 16)

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._steps += 1
        if self._steps == 1:
            time.sleep(self._first_step_s)
            future.set_result(StepResult(plan.step, ()))
        elif not self._hang:
            self._failed = True
            future.set_exception(ExecutorError("the device is gone"))
        return future

    def supply_masks(self, masks: GuideMasks) -> None:
        raise AssertionError("no request has a guide")

    def healthy(self) -> bool:
        return not self._failed

    def shutdown(self) -> None:
        self._failed = True


@pytest.mark.parametrize("hang", [False, True])
def test_a_dead_loop_fails_every_request_present_and_later(directory: Path, hang: bool) -> None:
    outputs = Outputs()
    config = EngineConfig(model="x", step_timeout_s=0.3, max_num_batched_tokens=4, max_num_seqs=2)
    model_config, tokenizer = ModelConfig.load(directory), Tokenizer(directory)
    compiler = GuideCompiler(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
    engine = Engine(config, model_config, tokenizer, BrokenExecutor(hang=hang), compiler, outputs.emit)
    for request_id in range(5):
        engine.submit(Request(request_id, tuple(range(3, 12)), SamplingParams(), 0.0))
    config_start = time.monotonic()
    engine.start()
    stop = threading.Event()
    sent: list[int] = []

    def keep_submitting() -> None:
        while not stop.is_set() and len(sent) < 500:
            sent.append(100 + len(sent))
            engine.submit(Request(sent[-1], (5, 6), SamplingParams(), time.monotonic()))
            time.sleep(0.002)

    thread = threading.Thread(target=keep_submitting)
    thread.start()
    ends = outputs.wait_for(*range(5))
    stop.set()
    thread.join()
    ends += outputs.wait_for(*sent)
    assert time.monotonic() - config_start < 10
    assert {end.failure.code for end in ends if end.failure} == {ErrorCode.UNAVAILABLE}
    assert all(end.failure for end in ends) and not engine.alive
    engine.submit(Request(7000, (5,), SamplingParams(), 0.0))
    (late,) = outputs.wait_for(7000)
    assert late.failure is not None and "died" in late.failure.message


def test_what_ended_before_a_failing_step_is_told_all_the_same(directory: Path) -> None:
    outputs = Outputs()
    executor = BrokenExecutor(hang=False, first_step_s=0.3)
    config = EngineConfig(model="x", max_num_batched_tokens=4)
    model_config, tokenizer = ModelConfig.load(directory), Tokenizer(directory)
    compiler = GuideCompiler(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
    engine = Engine(config, model_config, tokenizer, executor, compiler, outputs.emit)
    now = time.monotonic()
    engine.submit(Request(1, tuple(range(3, 12)), SamplingParams(), now, deadline=now + 0.2))
    engine.submit(Request(2, tuple(range(3, 12)), SamplingParams(), now, deadline=now + 100))
    engine.start()
    first, second = outputs.wait_for(1, 2)
    assert first.finish_reason is FinishReason.TIMEOUT
    assert second.failure is not None and second.failure.code is ErrorCode.UNAVAILABLE
