"""Scheduler: who runs in the next step, and with how many tokens. Owns every request's state; sees no tensor.

There is no prefill phase and no decode phase: a request has `num_computed_tokens`, which chases `num_tokens`, and a
step gives it a share of one token budget. Running requests come before waiting ones, each in order of arrival; where
the pool runs out, the latest arrival is preempted and recomputed later, so that the oldest always advances.

Invariants: `running` and `waiting` are in order of arrival, and all of `running` arrived before all of `waiting`;
a waiting request has no blocks; nothing waits that could never run (it was refused by `add`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from nereid.batch import BlockIds, NewRequest, ScheduledRequest, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError, QueueFullError
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import FinishReason, Request, RequestStatus, TokenLogprobs


@dataclass(slots=True)
class RequestState:
    """A request on its way. `known_to_executor`: the executor holds its prompt and tokens."""

    request: Request
    arrival: int  # ascending in order of arrival
    max_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    known_to_executor: bool = False

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step brought one request: a token, or the reason why none could be drawn."""

    state: RequestState
    token_id: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


class Scheduler:
    """Waiting and running requests under one token budget a step."""

    def __init__(
        self, config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """max_model_len: most tokens of a prompt and its output together; at most what the pool holds."""
        self._config = config
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._finished_ids: list[int] = []
        self._step = 0
        self._num_arrivals = 0
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    @property
    def has_work(self) -> bool:
        """Something to schedule, or something that the executor has to forget."""
        return bool(self._waiting or self._running or self._finished_ids)

    def requests(self) -> Iterator[RequestState]:
        """All unfinished requests, running ones first."""
        yield from self._running
        yield from self._waiting

    def add(self, request: Request) -> RequestState:
        """Queue a request. Raises QueueFullError, or InvalidRequestError where it could never run."""
        prompt_len = len(request.prompt_token_ids)
        room = self._max_model_len - prompt_len
        if not prompt_len:
            raise InvalidRequestError("prompt: got no tokens; allowed: at least one token")
        if room < 1:
            allowed = f"at most {self._max_model_len - 1} tokens (max_model_len {self._max_model_len}, output included)"
            raise InvalidRequestError(f"prompt: got {prompt_len} tokens; allowed: {allowed}")
        free_places = self._config.max_num_seqs - len(self._running)
        if len(self._waiting) >= self._config.max_queue_size + free_places:
            raise QueueFullError(
                f"the queue is full: max_queue_size {self._config.max_queue_size} requests are waiting"
            )
        self._num_arrivals += 1
        state = RequestState(request, self._num_arrivals, min(request.sampling.max_tokens, room))
        self._waiting.append(state)
        return state

    def schedule(self) -> SchedulerOutput:
        """The plan of the next step; empty where nothing can run."""
        rows: dict[int, ScheduledRequest] = {}
        budget = self._config.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            state = self._running[index]
            count = min(state.num_tokens - state.num_computed_tokens, budget)
            blocks, victims = self._grow_preempting(state, count)
            preempted = preempted or victims
            if blocks is None:
                break
            rows[state.request_id] = self._row(state, count, blocks, restarted=False)
            budget -= count
            index += 1
        new_requests: list[NewRequest] = []
        if not preempted:
            new_requests = self._admit(rows, budget)
        self._step += 1
        finished, self._finished_ids = tuple(self._finished_ids), []
        return SchedulerOutput(self._step, tuple(new_requests), tuple(rows.values()), finished)

    def _grow_preempting(self, state: RequestState, count: int) -> tuple[BlockIds | None, bool]:
        """Blocks for `count` more tokens, at the cost of later arrivals; None where the request itself had to go."""
        preempted = False
        while (blocks := self._kv_cache.grow(state.request_id, state.num_computed_tokens + count)) is None:
            preempted = True
            if self.preempt_latest() is state:
                break
        return blocks, preempted

    def preempt_latest(self) -> RequestState:
        """Take the blocks of the running request that arrived last; it is recomputed when there is room again."""
        state = self._running.pop()
        self._kv_cache.free(state.request_id)
        state.status = RequestStatus.PREEMPTED
        state.num_computed_tokens = 0
        self._waiting.appendleft(state)
        self._num_preemptions += 1
        return state

    def _admit(self, rows: dict[int, ScheduledRequest], budget: int) -> list[NewRequest]:
        """Start waiting requests while budget, places and blocks for all their known tokens last."""
        new_requests = []
        # Prompts that are still being chunked take their blocks as they go; those are not to be had twice.
        promised = sum(map(self._num_missing_blocks, self._running))
        while self._waiting and budget > 0 and len(self._running) < self._config.max_num_seqs:
            state = self._waiting[0]
            promised += self._num_missing_blocks(state)
            if promised > self._kv_cache.num_free_blocks:
                break
            count = min(state.num_tokens, budget)
            blocks = self._kv_cache.grow(state.request_id, count)
            assert blocks is not None, "there are as many blocks as were counted"
            promised -= sum(map(len, blocks))
            self._waiting.popleft()
            self._running.append(state)
            rows[state.request_id] = self._row(state, count, blocks, restarted=state.known_to_executor)
            state.status = RequestStatus.RUNNING
            if not state.known_to_executor:
                request = state.request
                new_requests.append(NewRequest(request.request_id, request.prompt_token_ids, request.sampling))
                state.known_to_executor = True
            budget -= count
        return new_requests

    def _num_missing_blocks(self, state: RequestState) -> int:
        return self._kv_cache.num_missing_blocks(state.request_id, state.num_tokens)

    @staticmethod
    def _row(state: RequestState, count: int, blocks: BlockIds, *, restarted: bool) -> ScheduledRequest:
        samples = state.num_computed_tokens + count == state.num_tokens
        return ScheduledRequest(state.request_id, state.num_computed_tokens, count, blocks, restarted, samples)

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Advance]:
        """Take in what a step computed. Requests that it ended are still to be finished by the caller."""
        running = {state.request_id: state for state in self._running}
        for row in plan.scheduled:
            if state := running.get(row.request_id):
                state.num_computed_tokens = row.num_computed_tokens + row.num_scheduled_tokens
        advances = []
        for token in result.sampled:
            if state := running.get(token.request_id):
                if token.error is None:
                    state.output_token_ids.append(token.token_id)
                reason = self._finish_reason(state) if token.error is None else None
                advances.append(Advance(state, token.token_id, reason, token.error, token.logprobs))
        return advances

    def _finish_reason(self, state: RequestState) -> FinishReason | None:
        sampling = state.request.sampling
        token, count = state.output_token_ids[-1], len(state.output_token_ids)
        if count > sampling.min_tokens and (
            token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= state.max_tokens else None

    def finish(self, state: RequestState) -> None:
        """Forget a request and give its blocks back, wherever it stands."""
        if state.status is RequestStatus.RUNNING:
            self._running.remove(state)
        else:
            self._waiting.remove(state)
        self._kv_cache.free(state.request_id)
        if state.known_to_executor:
            self._finished_ids.append(state.request_id)
        state.status = RequestStatus.FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError where the scheduler's books and the block tables disagree."""
        self._kv_cache.check_integrity()
        arrivals = [state.arrival for state in self.requests()]
        assert arrivals == sorted(arrivals), f"not in order of arrival: {arrivals}"
        tables = self._kv_cache.tables
        assert set(tables) <= {state.request_id for state in self._running}, "blocks without a running request"
        for state in self._running:
            assert state.num_computed_tokens <= state.num_tokens, f"request {state.request_id} computed too much"
            self._kv_cache.check_holds(state.request_id, state.num_computed_tokens)
