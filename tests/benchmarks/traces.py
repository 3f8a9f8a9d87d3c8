"""Traces of real traffic, and a scheduler driven by them without a model: every request draws its own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid.batch import SampledToken, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import Request, SamplingParams
from nereid.scheduler import Scheduler

BLOCK = 16
_MOONCAKE_SCALE = 32  # its blocks are of 512 tokens
_OUTPUT_TOKENS = 1 << 40  # ids from here on are outputs: no two are alike


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """at: seconds since the trace began.  prompt: token ids."""

    at: float
    prompt: tuple[int, ...]
    num_output_tokens: int


def mooncake(path: Path) -> Iterator[TracedRequest]:
    """Mooncake's conversation trace (Qin et al. 2024, arXiv 2407.00079), lengths divided by 32: one of its blocks of
    512 tokens becomes one of 16, whose token ids follow from the block's hash id."""
    with path.open(encoding="utf-8") as file:
        for entry in map(json.loads, file):
            length = max(1, round(entry["input_length"] / _MOONCAKE_SCALE))
            tokens = [hash_id * BLOCK + offset for hash_id in entry["hash_ids"] for offset in range(BLOCK)]
            outputs = max(1, round(entry["output_length"] / _MOONCAKE_SCALE))
            yield TracedRequest(entry["timestamp"] / 1e3, tuple(tokens[:length]), outputs)


@dataclass(frozen=True, slots=True)
class HitCounts:
    """Prompt tokens, and those of them that were found."""

    num_tokens: int
    num_found: int

    @property
    def rate(self) -> float:
        return self.num_found / self.num_tokens


def ideal_hits(requests: Iterable[TracedRequest]) -> HitCounts:
    """What a cache without bounds would find, of full blocks, if every request were over before the next one comes. At
    least one token of each is left to compute."""
    known: set[int] = set()
    num_tokens = num_found = 0
    for request in requests:
        prefix, found, going_on = 0, 0, True
        for start in range(0, len(request.prompt) - BLOCK + 1, BLOCK):
            prefix = hash((prefix, request.prompt[start : start + BLOCK]))
            going_on = going_on and prefix in known
            found += BLOCK * going_on
            known.add(prefix)
        num_tokens += len(request.prompt)
        num_found += min(found, (len(request.prompt) - 1) // BLOCK * BLOCK)
    return HitCounts(num_tokens, num_found)


def hits(requests: Sequence[TracedRequest], num_blocks: int, num_at_once: int = 64) -> HitCounts:
    """What Nereid's scheduler and prefix cache find with a pool of `num_blocks` blocks, in the trace's order, with at
    most `num_at_once` requests on their way."""
    config = EngineConfig.from_mapping(
        {"model": "x", "block_size": BLOCK, "max_num_seqs": num_at_once, "max_num_batched_tokens": 2048}
    )
    kv_cache = KVCacheManager(num_blocks, BlockLayout(BLOCK, max_step_tokens=2048))
    longest = max(len(request.prompt) + request.num_output_tokens for request in requests)
    scheduler = Scheduler(config, kv_cache, longest, ())
    num_found = num_added = num_drawn = 0
    while num_added < len(requests) or scheduler.has_work:
        while num_added < len(requests) and scheduler.num_running + scheduler.num_waiting < num_at_once:
            traced = requests[num_added]
            sampling = SamplingParams(max_tokens=traced.num_output_tokens, ignore_eos=True)
            scheduler.add(Request(num_added, traced.prompt, sampling, float(num_added)))
            num_added += 1
        plan = scheduler.schedule()
        for advance in scheduler.update(plan, _drawn(plan, num_drawn)):
            if advance.finish_reason:
                num_found += advance.state.num_cached_tokens
                scheduler.finish(advance.state)
        num_drawn += len(plan.scheduled)
    return HitCounts(sum(len(request.prompt) for request in requests), num_found)


def _drawn(plan: SchedulerOutput, first: int) -> StepResult:
    rows = [row for row in plan.scheduled if row.samples]
    sampled = (SampledToken(row.request_id, _OUTPUT_TOKENS + first + i) for i, row in enumerate(rows))
    return StepResult(plan.step, tuple(sampled))
