"""EngineCore: the steps of the engine. Owns the scheduler, the KV cache's books and what is kept of each request.

Used by the loop thread alone. Every method returns what requests gained, as RequestOutputs; what becomes of those is
the caller's. Invariant: a request that was accepted gets exactly one finished output, and is then forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, replace

from nereid.batch import Capacity, DrawFault, EngineStats, GuideMasks, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.errors import (
    EngineStoppedError,
    ExecutorError,
    GuideError,
    NereidError,
    NoTokenError,
    NumericsError,
    QueueFullError,
    QueueTimeoutError,
    RequestCancelledError,
    RequestError,
)
from nereid.executor import Executor
from nereid.guided.compiler import GuideCompiler
from nereid.guided.tracker import GuideTracker
from nereid.kv_cache.manager import KVCacheManager
from nereid.model_config import ModelConfig
from nereid.output_processor import OutputProcessor
from nereid.request import FinishReason, Request, RequestFailure, RequestOutput, RequestStats
from nereid.scheduler import Advance, RequestState, Scheduler
from nereid.scheduling.due_times import DueTimes
from nereid.statistics import EngineStatistics
from nereid.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class _Tracked:
    """A request on its way, and what it will be told about itself at its end."""

    state: RequestState
    stats: RequestStats


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
        self._kv_cache = KVCacheManager(capacity.num_blocks, capacity.group_block_sizes)
        wanted = config.max_model_len or model.max_position_embeddings
        self.max_model_len = min(wanted, model.max_position_embeddings, self._kv_cache.max_tokens)
        self._scheduler = Scheduler(config, self._kv_cache, self.max_model_len, model.eos_token_ids)
        self._outputs = OutputProcessor(tokenizer)
        self._guides = GuideTracker(compiler, model.vocab_size)
        self._requests: dict[int, _Tracked] = {}
        self._due_times = DueTimes(config.queue_timeout_ms / 1e3)
        self.statistics = EngineStatistics()

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self._scheduler.has_work

    @property
    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._requests)

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
            self._guides.add(request.request_id, request.sampling.guide)
            state = self._scheduler.add(request)
        except NereidError as error:
            self._guides.drop(request.request_id)
            yield RequestOutput(request.request_id, failure=as_data(error))
            return
        stats = RequestStats(request.arrival_time, num_prompt_tokens=len(request.prompt_token_ids))
        self._requests[request.request_id] = _Tracked(state, stats)
        self._outputs.add(request)
        self._due_times.watch(state)
        self.statistics.accepted(request)
        if displaced := self._scheduler.displaced():
            full = f"the queue is full: max_queue_size {self._config.max_queue_size} requests are waiting"
            share = "and this request's cache_salt has more than its share of them"
            yield self._end_failed(displaced, QueueFullError(f"{full}, {share}"))

    def cancel(self, request_id: int) -> Iterator[RequestOutput]:
        """End a request; nothing happens where it has ended."""
        if tracked := self._requests.get(request_id):
            yield self._end_failed(tracked.state, RequestCancelledError("the request was cancelled"))

    def expire(self, now: float) -> Iterator[RequestOutput]:
        """End the requests whose deadline has passed, and those that waited too long."""
        for state in self._due_times.expired(now):
            request = state.request
            if request.deadline is not None and now >= request.deadline:
                yield self._forget(state, self._outputs.end(request.request_id, FinishReason.TIMEOUT))
            else:
                waited = f"not scheduled within queue_timeout_ms ({self._config.queue_timeout_ms})"
                yield self._end_failed(state, QueueTimeoutError(waited))

    def step(self) -> Iterator[RequestOutput]:
        """One step: schedule, run, sample. Raises ExecutorError."""
        start = time.monotonic()
        plan = self._scheduler.schedule()
        if plan.scheduled or plan.finished_ids:
            planned = time.monotonic()
            self._track(plan, planned)
            result = self._run(plan)
            self._outputs.keep_prompt_logprobs(result.prompt_logprobs)
            now = time.monotonic()
            for advance in self._scheduler.update(plan, result):
                yield self._advance(advance, now)
            if plan.scheduled:
                self.statistics.stepped(plan.num_scheduled_tokens, start, planned, now, time.monotonic())

    def failures(self, error: NereidError) -> tuple[RequestOutput, ...]:
        """The last outputs of all requests, where the engine cannot or may not go on; `clear` is to follow.

        Reads nothing that a fault may have spoilt.
        """
        failure = as_data(error)
        return tuple(RequestOutput(i, failure=failure, stats=tracked.stats) for i, tracked in self._requests.items())

    def clear(self) -> None:
        """Forget all requests."""
        for tracked in list(self._requests.values()):
            self._end_failed(tracked.state, EngineStoppedError())

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

    def _track(self, plan: SchedulerOutput, now: float) -> None:
        self.statistics.scheduled(row.request_id for row in plan.scheduled)
        for row in plan.scheduled:
            tracked = self._requests[row.request_id]
            stats = tracked.stats
            num_blocks = sum(map(len, row.new_block_ids))
            if num_blocks or stats.first_scheduled_time is None:
                tracked.stats = replace(
                    stats,
                    first_scheduled_time=stats.first_scheduled_time or now,
                    num_new_blocks=stats.num_new_blocks + num_blocks,
                    num_preemptions=stats.num_preemptions + row.restarted,
                )

    def _advance(self, advance: Advance, now: float) -> RequestOutput:
        state = advance.state
        if advance.fault is not None:
            return self._end_failed(state, _as_error(advance.fault, state.num_tokens))
        try:
            complete = self._guides.advance(state.request_id, advance.token_id)
        except GuideError as error:
            return self._end_failed(state, error)
        reason = advance.finish_reason
        completes = complete and reason is not FinishReason.STOP
        tracked = self._requests[state.request_id]
        num_tokens = len(state.output_token_ids) - tracked.stats.num_output_tokens
        self.statistics.advanced(tracked.stats, num_tokens, now)
        tracked.stats = replace(
            tracked.stats,
            first_token_time=tracked.stats.first_token_time or now,
            last_token_time=now,
            num_output_tokens=len(state.output_token_ids),
        )
        output = self._outputs.advance(
            state.request_id,
            advance.token_id,
            FinishReason.STOP if completes else reason,
            advance.logprobs,
            completes=completes,
        )
        return self._forget(state, output) if output.finished else output

    def _end_failed(self, state: RequestState, error: NereidError) -> RequestOutput:
        self._outputs.drop(state.request_id)
        return self._forget(state, RequestOutput(state.request_id, failure=as_data(error)))

    def _forget(self, state: RequestState, output: RequestOutput) -> RequestOutput:
        """The request's last output, with its stats; nothing of it is kept."""
        self._scheduler.finish(state)
        self._guides.drop(state.request_id)
        self._due_times.forget(state)
        stats = self._requests.pop(state.request_id).stats
        self.statistics.finished(state.request, stats)
        return replace(output, stats=stats)


def _as_error(fault: DrawFault, position: int) -> RequestError:
    kind = NumericsError if fault is DrawFault.NOT_FINITE else NoTokenError
    return kind(f"no token can be drawn at position {position}: {fault.value}")


def as_data(error: NereidError) -> RequestFailure:
    """An error as what crosses the queue to the server's side."""
    return RequestFailure(error.code, str(error))
