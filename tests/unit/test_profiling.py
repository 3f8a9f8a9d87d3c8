"""The steps that a model is profiled with: as large as a deployment allows, never larger, and soon over."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from nereid.batch import SchedulerOutput
from nereid.errors import ConfigError
from nereid.kv_memory.budget import MemoryUse
from nereid.memory.reading import MemoryReading
from nereid.profiling import LargestStep, Profile, Row, StepLimits, largest_step, not_profiled, profile

LIMITS = StepLimits(
    max_tokens=512, max_rows=64, max_len=8192, max_logprobs=20, block_size=16, num_groups=2, num_layers=3
)


def limits(**changes: int) -> StepLimits:
    return replace(LIMITS, **changes)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (limits(), (Row(449, 8191), *[Row(1, 1024)] * 63)),
        (limits(max_rows=1), (Row(512, 8191),)),
        (limits(max_tokens=3), (Row(1, 8191),) * 3),
        (limits(max_tokens=1, max_len=2), (Row(1, 1),)),
        (limits(max_tokens=20, max_rows=3, max_len=9), (Row(8, 8), Row(8, 8), Row(4, 8))),
        (limits(max_tokens=512, max_rows=3, max_len=9), (Row(8, 8),) * 3),
    ],
)
def test_the_largest_step_has_all_tokens_and_rows_at_the_longest_contexts(
    step: StepLimits, expected: tuple[Row, ...]
) -> None:
    assert largest_step(step) == LargestStep(expected, 1.0)


def test_a_context_that_would_take_long_is_cut_and_its_memory_counted_up() -> None:
    step = largest_step(limits(max_tokens=1024, max_rows=1, max_len=131_072 + 1))
    assert step == LargestStep((Row(1024, 32_768),), 4.0)
    step = largest_step(limits(max_tokens=1 << 16, max_rows=1, max_len=131_072 + 1))
    assert step.rows == (Row(1 << 16, 1 << 16),) and step.factor == 2.0


class Machine:
    """A model runner and a meter: a step takes as much memory and time as it has tokens of context."""

    def __init__(self) -> None:
        self.plans: list[tuple[SchedulerOutput, int | None]] = []
        self.held = 1000
        self.peak = 5000

    def compute(self, plan: SchedulerOutput, num_layers: int | None) -> None:
        self.plans.append((plan, num_layers))
        contexts = sum(row.num_computed_tokens + row.num_scheduled_tokens for row in plan.scheduled)
        self.peak = max(self.peak, self.held + contexts)

    def forget_peak(self) -> None:
        self.peak = self.held

    def read(self) -> MemoryReading:
        return MemoryReading(9000, 7000, self.held, self.peak)

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_the_largest_step_is_measured_through_each_kind_of_layer_and_prompts_through_all() -> None:
    machine = Machine()
    profiled = profile(machine.compute, machine, LIMITS)
    largest = 8191 + 63 * 1024
    assert profiled.memory == MemoryUse(9000, 7000, 1000, (("the largest step", largest),))
    assert profiled.prefill_tokens_per_s is not None and profiled.prefill_tokens_per_s > 0
    by_size = [(plan.num_scheduled_tokens, len(plan.scheduled), layers) for plan, layers in machine.plans]
    prompts = [(32, 1, None)] * 2 + [(128, 1, None)] * 2 + [(512, 1, None)] * 2
    assert by_size == [*prompts, (512, 64, 3), (64, 1, 3), (0, 0, None)]


def test_in_the_interpreter_memory_is_read_and_nothing_run() -> None:
    assert not_profiled(Machine()) == Profile(MemoryUse(9000, 7000, 1000, (("the largest step", 0),)), None)


def test_a_whole_prompt_is_measured_too_where_decodes_have_most_of_a_step() -> None:
    machine = Machine()
    profile(machine.compute, machine, limits(max_rows=500))
    assert [plan.num_scheduled_tokens for plan, layers in machine.plans if layers] == [512, 512, 64]
    assert [len(plan.scheduled) for plan, layers in machine.plans if layers] == [500, 1, 1]


def test_plans_are_as_the_scheduler_writes_them_and_leave_nothing_behind() -> None:
    machine = Machine()
    profile(machine.compute, machine, LIMITS)
    known: set[int] = set()
    for plan, _ in machine.plans:
        known -= set(plan.finished_ids)
        added = {new.request_id: len(new.prompt_token_ids) for new in plan.new_requests}
        assert not known & added.keys() and all(request_id < 0 for request_id in added)
        known |= added.keys()
        for row in plan.scheduled:
            assert row.num_computed_tokens + row.num_scheduled_tokens == added[row.request_id] <= LIMITS.max_len - 1
            assert row.samples and row.first_new_blocks == (0, 0)
            assert row.new_block_ids == ((1,) * -(-added[row.request_id] // LIMITS.block_size),) * 2
    assert not known


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate memory: you tried to allocate 9 bytes\nat x.cpp:1"), MemoryError()]
)
def test_a_step_that_cannot_be_run_is_refused_by_the_settings_that_make_it(error: Exception) -> None:
    machine = Machine()

    def compute(plan: SchedulerOutput, num_layers: int | None) -> None:
        if len(plan.scheduled) == 64:
            raise error

    reason = str(error).partition("\n")[0] or "MemoryError"
    message = (
        "max_num_batched_tokens: got 512 with max_num_seqs 64 and requests of up to 8192 tokens; allowed: steps that"
    )
    with pytest.raises(ConfigError, match=rf"{message} this machine has the memory for \({reason}\)"):
        profile(compute, machine, LIMITS)


def test_a_fault_of_the_model_is_not_taken_for_a_lack_of_memory() -> None:
    def compute(plan: SchedulerOutput, num_layers: int | None) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        profile(compute, Machine(), LIMITS)
