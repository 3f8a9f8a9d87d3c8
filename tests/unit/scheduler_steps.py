"""A scheduler driven step by step without a model: every request that samples draws the same token."""

from __future__ import annotations

from collections.abc import Callable

from nereid.batch import SampledToken, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import Request, SamplingParams
from nereid.scheduler import Advance, Scheduler

EOS = 2


def make_scheduler(num_blocks: int = 100, max_model_len: int = 64, **settings: int) -> Scheduler:
    config = EngineConfig.from_mapping({"model": "x", "block_size": 4, **settings})
    return Scheduler(config, KVCacheManager(num_blocks, BlockLayout(4)), max_model_len, (EOS,))


def make_request(
    request_id: int,
    prompt_len: int,
    *,
    salt: str = "",
    priority: int = 0,
    at: float = 0.0,
    deadline: float | None = None,
    **sampling: object,
) -> Request:
    """No two prompts share a token. at, deadline: seconds on the monotonic clock."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
    first = 10 + 1000 * request_id
    prompt = tuple(range(first, first + prompt_len))
    return Request(request_id, prompt, params, at, deadline, priority=priority, cache_salt=salt)


def run_step(
    scheduler: Scheduler, token_id: int = 9, *, draw: Callable[[int], int] | None = None, check: bool = True
) -> tuple[SchedulerOutput, list[Advance]]:
    """A step in which every sampling request draws `token_id`, or what `draw` gives for its id; ended requests are
    finished."""
    plan = scheduler.schedule()
    drawing = [row.request_id for row in plan.scheduled if row.samples]
    sampled = tuple(SampledToken(i, token_id if draw is None else draw(i)) for i in drawing)
    advances = scheduler.update(plan, StepResult(plan.step, sampled))
    for advance in advances:
        if advance.finish_reason:
            scheduler.finish(advance.state)
    if check:
        scheduler.check_integrity()
    return plan, advances


def counts(plan: SchedulerOutput) -> dict[int, int]:
    return {row.request_id: row.num_scheduled_tokens for row in plan.scheduled}


def first_scheduled(scheduler: Scheduler, num_steps: int = 1000) -> list[int]:
    """Ids of requests in the order in which they were first scheduled, until nothing is left to do."""
    order: list[int] = []
    for _ in range(num_steps):
        order += [new.request_id for new in run_step(scheduler)[0].new_requests]
        if not scheduler.has_work:
            break
    return order
