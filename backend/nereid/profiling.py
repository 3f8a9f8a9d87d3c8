"""Profiling: what a step takes at most in memory, and how fast prompts are computed, measured with the model that is
to be served, before there is a KV cache. It also warms up what is slow at its first use.

Steps are plans like any other, of made-up requests whose block tables name one and the same block, so that a context
of any length needs next to no cache. A layer's memory is the next one's, so the largest steps are run through as many
layers as it takes to meet each kind of them. Invariant: every made-up request is forgotten afterwards.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nereid.batch import NewRequest, ScheduledRequest, SchedulerOutput
from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.kv_memory.budget import MemoryUse
from nereid.kv_memory.groups import KVCacheGroup, num_layers_of_all_kinds
from nereid.memory.meters import Meter
from nereid.memory.reading import MemoryReading
from nereid.request import SamplingParams

_LOG = logging.getLogger(__name__)
SCRATCH_BLOCKS = 2  # of the cache that steps are profiled on: the null block, and the one in all block tables
_CHUNK, _GROWTH = 32, 4  # tokens; a prompt is timed in chunks that grow
_TRIES = 2  # of each; the first also warms up what is slow at its first use
_LONGEST_CHUNK_S = 0.8  # none is timed that may take longer, but for the first
_TOLD_TOKENS = 64  # of a prompt whose logprobs are told
_DECODE_TOKENS = 1 << 16  # contexts of a step's decodes together; more take no more memory
_MOST_SCORES = 1 << 25  # query tokens x context tokens of a profiled step, so that it ends soon

Compute = Callable[[SchedulerOutput, int | None], object]
"""Carries out a plan on the scratch cache, through the first so many layers, or all (None)."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the largest step is, and how to write it down.

    max_tokens, max_rows: of a step.  max_len: tokens of a request.  max_logprobs: as in EngineConfig.  block_size,
    num_groups: of the KV cache.  num_layers: the first layers among which there is one of each kind.
    """

    max_tokens: int
    max_rows: int
    max_len: int
    max_logprobs: int
    block_size: int
    num_groups: int
    num_layers: int

    @classmethod
    def of(cls, config: EngineConfig, groups: tuple[KVCacheGroup, ...], max_len: int) -> StepLimits:
        """max_len: tokens of a request."""
        return cls(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            max_len,
            config.max_logprobs,
            config.block_size,
            len(groups),
            num_layers_of_all_kinds(groups),
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """memory: before there is a pool.  prefill_tokens_per_s: of a prompt that is computed alone; None where nothing was
    measured."""

    memory: MemoryUse
    prefill_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """The last num_tokens tokens of a prompt of `end` tokens; the next one is drawn."""

    num_tokens: int
    end: int


@dataclass(frozen=True, slots=True)
class LargestStep:
    """factor: how many times the memory of these rows it takes at most, as their contexts are cut so that they do not
    take long."""

    rows: tuple[Row, ...]
    factor: float


def profile(compute: Compute, meter: Meter, limits: StepLimits) -> Profile:
    """Run steps on a cache of SCRATCH_BLOCKS blocks without NaN. Raises ConfigError where the largest cannot be run."""
    start = time.monotonic()
    prober = _Prober(compute, limits)
    rate = _prefill_rate(prober, limits)
    step = largest_step(limits)
    before = meter.read()
    meter.forget_peak()
    try:
        with meter.bounded():
            _run_largest(prober, step, limits)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(_cannot_run(limits, error)) from error
    step_bytes = math.ceil((meter.read().peak - before.held) * step.factor)
    prober.forget()
    _LOG.info(
        "profiled in %.1f s: a step of %d tokens of %d requests takes %.1f MiB; prompts: %.0f tokens/s",
        time.monotonic() - start, sum(row.num_tokens for row in step.rows), len(step.rows), step_bytes / 2**20, rate,
    )  # fmt: skip
    return Profile(_use(before, step_bytes), rate)


def not_profiled(meter: Meter) -> Profile:
    """For kernels in the interpreter, whose largest step takes many minutes: steps count as nothing."""
    return Profile(_use(meter.read(), 0), None)


def _use(reading: MemoryReading, step_bytes: int) -> MemoryUse:
    return MemoryUse(reading.total, reading.available, reading.held, (("the largest step", step_bytes),))


def largest_step(limits: StepLimits) -> LargestStep:
    """All requests that can run at once, with as many tokens as a step has. Prompts come first, each as long as it can
    be, at the end of the longest contexts; the others are decodes."""
    longest = limits.max_len - 1  # one token is still to be drawn
    counts = [1] * min(limits.max_rows, limits.max_tokens)
    spare = limits.max_tokens - len(counts)
    for index in range(len(counts)):
        more = min(spare, longest - 1)
        counts[index] += more
        spare -= more
    num_prompt_tokens = sum(count for count in counts if count > 1)
    context = min(longest, max(1, _MOST_SCORES // max(1, num_prompt_tokens)))
    decode_context = min(longest, max(1, _DECODE_TOKENS // len(counts)))
    rows = tuple(Row(count, max(count, context) if count > 1 else decode_context) for count in counts)
    num_scores = sum(row.num_tokens * row.end for row in rows if row.num_tokens > 1)
    return LargestStep(rows, num_prompt_tokens * longest / num_scores if num_scores else 1.0)


def _run_largest(prober: _Prober, step: LargestStep, limits: StepLimits) -> None:
    """The largest step; a prompt that has all its tokens, where decodes have most of them; a prompt that is told."""
    # What takes memory: logits that are changed, and kept aside unchanged; rows that are looked at whole.
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=limits.max_logprobs)
    prober.run(step.rows, sampling, limits.num_layers)
    alone = min(limits.max_tokens, limits.max_len - 1)
    context = max(row.end for row in step.rows)
    if alone > 2 * step.rows[0].num_tokens:
        prober.run([Row(alone, max(alone, context))], sampling, limits.num_layers)
    told = min(alone, _TOLD_TOKENS)
    telling = SamplingParams(temperature=0.0, prompt_logprobs=limits.max_logprobs)
    prober.run([Row(told, max(told, context))], telling, limits.num_layers)


def _prefill_rate(prober: _Prober, limits: StepLimits) -> float:
    """Tokens a second, by the fastest of a few tries, which a busy machine changes least."""
    most = min(limits.max_tokens, limits.max_len - 1)
    count, rate = min(_CHUNK, most), 0.0
    while True:
        rows, sampling = [Row(count, count)], SamplingParams(temperature=0.0)
        seconds = min(prober.run(rows, sampling) for _ in range(_TRIES))
        rate = max(rate, count / seconds)
        if count == most or seconds * _GROWTH > _LONGEST_CHUNK_S:
            return rate
        count = min(most, count * _GROWTH)


def _cannot_run(limits: StepLimits, error: BaseException) -> str:
    size = f"{limits.max_tokens} with max_num_seqs {limits.max_rows} and requests of up to {limits.max_len} tokens"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"max_num_batched_tokens: got {size}; allowed: steps that this machine has the memory for ({reason})"


class _Prober:
    """Writes plans of made-up requests, each forgotten with the next plan, and has them carried out."""

    def __init__(self, compute: Compute, limits: StepLimits) -> None:
        self._compute = compute
        self._limits = limits
        self._known: tuple[int, ...] = ()
        self._step = 0

    def run(self, rows: Sequence[Row], sampling: SamplingParams, num_layers: int | None = None) -> float:
        """How many seconds it takes until the tokens are drawn."""
        finished, self._known = self._known, tuple(range(-len(rows), 0))
        self._step += 1
        new = tuple(NewRequest(i, (0,) * row.end, sampling) for i, row in zip(self._known, rows, strict=True))
        scheduled = tuple(self._scheduled(i, row) for i, row in zip(self._known, rows, strict=True))
        plan = SchedulerOutput(self._step, new, scheduled, finished)
        start = time.perf_counter()
        self._compute(plan, num_layers)
        return time.perf_counter() - start

    def forget(self) -> None:
        """The requests of the last plan."""
        self._compute(SchedulerOutput(self._step + 1, (), (), self._known), None)
        self._known = ()

    def _scheduled(self, request_id: int, row: Row) -> ScheduledRequest:
        groups = range(self._limits.num_groups)
        table = (SCRATCH_BLOCKS - 1,) * -(-row.end // self._limits.block_size)
        first = row.end - row.num_tokens
        return ScheduledRequest(
            request_id, first, row.num_tokens, True, tuple(0 for _ in groups), tuple(table for _ in groups)
        )
