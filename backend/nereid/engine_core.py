"""EngineCore: the steps of the engine. Owns the scheduler, the KV cache's books and the requests on their way.

Used by the loop thread alone. Every method returns what requests gained, as RequestOutputs; what becomes of those is
the caller's. Invariant: a request that was accepted gets exactly one final output, and is then forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from itertools import islice

from nereid.batch import Capacity, EngineStats, GuideMasks, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.errors import (
    EngineStoppedError,
    ExecutorError,
    NereidError,
    QueueFullError,
    QueueTimeoutError,
    RequestCancelledError,
)
from nereid.executor import Executor
from nereid.guided.compiler import GuideCompiler
from nereid.guided.tracker import GuideTracker
from nereid.kv_cache.manager import make_kv_cache
from nereid.model_config import ModelConfig
from nereid.output_processor import OutputProcessor
from nereid.request import Request, RequestOutput
from nereid.request_tracker import RequestTracker, failed
from nereid.scheduler import Scheduler
from nereid.scheduling.due_times import DueTimes
from nereid.statistics import EngineStatistics
from nereid.tokenization.tokenizer import Tokenizer

_STORES_AT_ONCE = 32


class EngineCore:
    """One model's requests, driven step by step."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        model: ModelConfig,
        tokenizer: Tokenizer,
        executor: Executor,
        compiler: GuideCompiler,
    ) -> None:
        """capacity: of the executor, which has started.  compiler: knows the guides of requests that were checked."""
        self._config = config
        self._executor = executor
        self._kv_cache = make_kv_cache(capacity, config.max_num_batched_tokens)
        wanted = config.model_len(model.max_position_embeddings)
        self.max_model_len = min(wanted, self._kv_cache.max_tokens)
        self._scheduler = Scheduler(config, self._kv_cache, self.max_model_len, model.eos_token_ids)
        self._guides = GuideTracker(compiler, model.vocab_size)
        self._due_times = DueTimes(config.queue_timeout_ms / 1e3)
        self.statistics = EngineStatistics()
        self._tracker = RequestTracker(
            self._scheduler, OutputProcessor(tokenizer), self._guides, self._due_times, self.statistics,
            model.eos_token_ids,
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self._scheduler.has_work

    @property
    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return self._tracker.request_ids

    @property
    def stats(self) -> EngineStats:
        """Counts as of now; read by any thread without a lock, each right by itself."""
        scheduler, kv_cache = self._scheduler, self._kv_cache
        return EngineStats(
            scheduler.num_running,
            scheduler.num_waiting,
            kv_cache.num_blocks - kv_cache.num_free_blocks,
            kv_cache.num_blocks,
            scheduler.num_preemptions,
            self.statistics.queue_age,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the books disagree."""
        self._scheduler.check_integrity()

    def accept(self, request: Request) -> Iterator[RequestOutput]:
        """Take a request in; a refusal is its only output, or that of another request whose place it takes."""
        try:
            self._tracker.add(request)
        except NereidError as error:
            yield failed(request.request_id, error)
            return
        if displaced := self._scheduler.displaced():
            full = f"the queue is full: max_queue_size {self._config.max_queue_size} requests are waiting"
            share = "and this request's cache_salt has more than its share of them"
            yield from self._tracker.fail(displaced.request_id, QueueFullError(f"{full}, {share}"))

    def cancel(self, request_id: int) -> Iterator[RequestOutput]:
        """End a request; nothing happens where it has ended."""
        return self._tracker.fail(request_id, RequestCancelledError("the request was cancelled"))

    def expire(self, now: float) -> Iterator[RequestOutput]:
        """End the requests whose deadline has passed, and those that waited too long."""
        for request in (leader.request for leader in self._due_times.expired(now)):
            if request.deadline is not None and now >= request.deadline:
                yield from self._tracker.break_off(request.request_id)
            else:
                waited = f"not scheduled within queue_timeout_ms ({self._config.queue_timeout_ms})"
                yield from self._tracker.fail(request.request_id, QueueTimeoutError(waited))

    def step(self) -> Iterator[RequestOutput]:
        """One step: schedule, run, sample. Raises ExecutorError."""
        start = time.monotonic()
        plan = self._scheduler.schedule()
        if plan.scheduled or plan.finished_ids or plan.kv_ops:
            planned = time.monotonic()
            self._tracker.scheduled(plan, planned)
            result = self._run(plan)
            now = time.monotonic()
            yield from self._tracker.advance(plan, result, now)
            if plan.scheduled:
                end = time.monotonic()
                self._scheduler.took(plan, end - start)
                self.statistics.stepped(plan.num_scheduled_tokens, start, planned, now, end)

    def failures(self, error: NereidError) -> tuple[RequestOutput, ...]:
        """The last outputs of all requests, where the engine cannot or may not go on; `clear` is to follow.

        Reads nothing that a fault may have spoilt.
        """
        return self._tracker.failures(error)

    def store_cached(self, deadline: float) -> None:
        """Have what is cached written to disk, where there is one, until `deadline` (monotonic seconds). Raises
        ExecutorError."""
        ops = iter(self._kv_cache.store_all())
        while time.monotonic() < deadline and (some := tuple(islice(ops, _STORES_AT_ONCE))):
            self._run(SchedulerOutput(0, (), (), (), some))

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in self.request_ids:
            list(self._tracker.fail(request_id, EngineStoppedError()))

    def _run(self, plan: SchedulerOutput) -> StepResult:
        timeout_s = self._config.step_timeout_s
        future = self._executor.submit(plan)
        # Made while the model runs. NOTE: the matchers know every token that was drawn before this step.
        guided, words = self._guides.masks(row.request_id for row in plan.scheduled if row.samples)
        if guided:
            self._executor.supply_masks(GuideMasks(plan.step, guided, words))
        try:
            return future.result(timeout_s)
        except futures.TimeoutError as error:  # its own kind in Python 3.10
            raise ExecutorError(f"step {plan.step} took longer than step_timeout_s ({timeout_s})") from error
