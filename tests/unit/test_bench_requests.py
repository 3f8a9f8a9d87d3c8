"""What the benchmark asks for, and how a worker answers: workloads, prompts, the replay, one job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nereid.bench import threads
from nereid.bench.contestants import CONTESTANTS
from nereid.bench.peer_venvs import ENVIRONMENTS
from nereid.bench.prompts import PromptSource
from nereid.bench.quiet import ProcessorTimes, read_times, taken_by_others
from nereid.bench.replay import RATES, TracedLengths, azure, replay
from nereid.bench.worker_loop import Steps, run_job
from nereid.bench.workloads import STEPS, WARM_UP, WORKLOADS, streams
from tests.conftest import shared_data

LONGEST = 8192
SHORT_X8 = [56, 38, 95, 94, 63, 80, 47, 69]


def test_workloads_are_what_their_names_say() -> None:
    by_name = {workload.name: workload for workload in WORKLOADS}
    assert [len(by_name[name].arrivals) for name in ("short-x8", "mid-x16", "mid-x32", "prefill-2000")] == [
        8,
        16,
        32,
        1,
    ]
    assert all(32 <= a.num_prompt_tokens <= 96 for a in by_name["short-x8"].arrivals)
    assert all(200 <= a.num_prompt_tokens <= 400 for a in by_name["mid-x32"].arrivals)
    assert all(workload.longest < LONGEST for workload in (*WORKLOADS, *STEPS, WARM_UP))


def test_lengths_never_change() -> None:
    """Figures of different days are of the same work."""
    assert [a.num_prompt_tokens for a in streams(4).arrivals] == [a.num_prompt_tokens for a in streams(4).arrivals]
    assert [a.num_prompt_tokens for a in WORKLOADS[1].arrivals] == SHORT_X8


def test_prompts_are_pieces_of_the_text_and_always_the_same() -> None:
    source = PromptSource(range(1000))
    for prompt, arrival in zip(source.prompts(WORKLOADS[4]), WORKLOADS[4].arrivals, strict=True):
        assert prompt == [(prompt[0] + i) % 1000 for i in range(arrival.num_prompt_tokens)]
    assert source.prompts(WARM_UP) == source.prompts(WARM_UP)


@pytest.mark.parametrize("rate", RATES)
def test_replay_keeps_rate_and_bounds(rate: float) -> None:
    trace = [TracedLengths(float(i * i % 977) + i * 100, 80 * i, 40 + i) for i in range(400)]
    workload = replay(trace, rate)
    assert len(workload.arrivals) == rate * 20
    assert workload.arrivals[0].at == 0.0 and workload.arrivals[-1].at == pytest.approx(20.0)
    assert (workload.arrivals[3].num_prompt_tokens, workload.arrivals[3].num_output_tokens) == (30, 5)
    assert workload.longest < LONGEST


def test_azures_trace_is_replayed_with_its_own_lengths() -> None:
    trace = azure(shared_data("azure_conv.csv"))
    arrivals = replay(trace, 1.0).arrivals
    assert [a.num_prompt_tokens for a in arrivals[:3]] == [max(1, round(t.num_prompt_tokens / 8)) for t in trace[:3]]


class Counting(Steps):
    """An engine whose step gives each request its next token."""

    def __init__(self) -> None:
        super().__init__(lambda: bool(self.left), self._step)
        self.left: dict[int, int] = {}
        self.added_at: list[float] = []

    def add(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.left[index] = max_tokens
        self.added_at.append(time.monotonic())

    def _step(self) -> Iterator[tuple[int, Sequence[int]]]:
        time.sleep(0.001)
        for index in list(self.left):
            yield index, [self.left[index]]
            self.left[index] -= 1
            if not self.left[index]:
                del self.left[index]

    def versions(self) -> dict[str, str]:
        return {}


def test_job_sends_each_request_at_its_time_and_gathers_its_tokens() -> None:
    engine = Counting()
    answers = run_job(engine, [[0.3, [1], 2], [0.0, [1], 3]], 60.0)
    assert [answer.token_ids for answer in answers] == [[2, 1], [3, 2, 1]]
    assert [answer.sent for answer in answers] == [0.3, 0.0]
    assert answers[0].at[0] > 0.3 and answers[1].at == sorted(answers[1].at)
    assert engine.added_at[1] - engine.added_at[0] > 0.29


def test_job_that_gets_no_tokens_ends() -> None:
    with pytest.raises(TimeoutError, match="5 tokens are missing"):
        run_job(Counting(), [[0.0, [1], 3], [9.0, [1], 2]], 0.0 - 1.0)


def test_what_others_take_is_told_from_ones_own() -> None:
    before, after = ProcessorTimes(1000, 500, 100), ProcessorTimes(1200, 650, 220)
    assert taken_by_others(before, after) == pytest.approx(30 / 200)
    assert taken_by_others(after, after) == 0.0
    first = read_times(1)
    assert 0 < first.busy < first.total <= read_times(1).total


RAW = """\
thread (7): nereid-loop;run (nereid/engine.py:10);get (_queuemodule.c.h:3);pthread_cond_timedwait (libc.so.6) 30
thread (7): nereid-loop;run (nereid/engine.py:11);PyThread_acquire_lock_timed (libpython3.11.so.1.0);0x7f (libc.so.6) 50
thread (7): nereid-loop;run (nereid/engine.py:12) 20
thread (9): nereid-executor;run (executor.py:3);wait (libtorch_cpu.so);pthread_cond_timedwait (libc.so.6) 40
thread (9): nereid-executor;run (executor.py:4);take_gil (libpython3.11.so.1.0);0x7f (libc.so.6) 60
"""


def test_only_the_interpreters_own_waits_are_waits_for_its_lock() -> None:
    found = threads.read_samples(RAW)
    assert (found[7].name, found[7].count, found[7].lock_waits) == ("nereid-loop", 100, 30)
    assert (found[9].count, found[9].lock_waits) == (100, 60)
    assert found[7].files == {"nereid/engine.py": 100}
    table = threads.describe(threads.Profile({7: 0.5, 9: 0.9, 11: 0.4, 12: 0.1}, found)).splitlines()
    assert table[1].split() == ["nereid-executor", "90.0", "%", "60.0", "%"]
    assert table[3].split() == ["2", "native", "threads", "50.0", "%", "-"]


def test_every_contestant_has_its_environment_and_every_environment_its_pins() -> None:
    assert {c.environment for c in CONTESTANTS if c.environment} <= set(ENVIRONMENTS)
    for environment in ENVIRONMENTS.values():
        lines = environment.pins.read_text("utf-8").splitlines()
        assert all("==" in line for line in (*environment.packages, *lines) if not line.startswith("#"))


def test_workers_of_others_stand_on_the_standard_library() -> None:
    """They run where nothing of Nereid's is installed."""
    source = Path(threads.__file__).with_name("worker_loop.py").read_text("utf-8")
    assert "import nereid" not in source and "from nereid" not in source
