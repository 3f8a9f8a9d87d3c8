"""Scheduler: who runs in the next step, and with how many tokens. Owns every request's state; sees no tensor.

There is no prefill phase and no decode phase: a request has `num_computed_tokens`, which chases `num_tokens`, and a
step gives it a share of one token budget. A running request has a seat; there are no more seats than tokens in a step.
A step's tokens go
1. to the front request (`Tenants.front`): one, at whatever cost to others, so that it always advances;
2. to the requests with one token left to compute: no prompt stalls a stream;
3. to prompts, running and waiting requests alike, as `PromptLine` orders them: tenants by what they were served,
   requests by rank. A rank is the arrival plus what the priority is worth in waiting; it never changes, so a request
   is overtaken only by those that arrive within (difference of priorities) x priority_ageing_ms after it.

Where the blocks come from, and at whose cost, `Seats` decides. The front request advances in every step until it ends,
and as everybody gets to the front, everybody ends.

Invariants: a waiting request has no blocks; nothing waits that could never run (it was refused by `add`); the front
request is in every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nereid.batch import DrawFault, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError, QueueFullError
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import FinishReason, Request, RequestStatus, TokenLogprobs
from nereid.scheduling.prompt_line import PromptLine
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.seats import Seats
from nereid.scheduling.step_plan import StepPlan
from nereid.scheduling.tenants import Tenants

__all__ = ["Advance", "RequestState", "Scheduler"]

_TOLD_TOKENS = 64  # of a prompt whose logprobs are told, in one step


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step brought one request: a token, or the reason why none could be drawn."""

    state: RequestState
    token_id: int
    finish_reason: FinishReason | None = None
    fault: DrawFault | None = None
    logprobs: TokenLogprobs | None = None


class Scheduler:
    """Waiting and running requests under one token budget a step."""

    def __init__(
        self, config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """max_model_len: most tokens of a prompt and its output together; at most what the pool holds."""
        self._config = config
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tenants = Tenants()
        self._seats = Seats(min(config.max_num_seqs, config.max_num_batched_tokens), kv_cache, self._tenants)
        self._finished_ids: list[int] = []
        self._step = 0
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        return self._tenants.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._seats.running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._seats.num_preemptions

    @property
    def has_work(self) -> bool:
        """Something to schedule, or something that the executor has to forget."""
        return bool(self._tenants or self._finished_ids)

    @property
    def _running(self) -> Iterable[RequestState]:
        return self._seats.running.values()

    def requests(self) -> Iterator[RequestState]:
        """All unfinished requests, in no order."""
        return (state for tenant in self._tenants for state in tenant.unfinished)

    def add(self, request: Request) -> RequestState:
        """Queue a request. Raises QueueFullError, or InvalidRequestError where it could never run.

        Where the queue is full and the request's tenant has less than its share of it, the request is taken all the
        same: `displaced` then tells who is to be refused in its stead.
        """
        room = self._room(request)
        if self._queue_is_full(1) and not self._may_displace(request.cache_salt):
            raise QueueFullError(
                f"the queue is full: max_queue_size {self._config.max_queue_size} requests are waiting"
            )
        self._num_arrivals += 1
        ageing_s = self._config.priority_ageing_ms / 1e3
        rank = (request.arrival_time + request.priority * ageing_s, self._num_arrivals)
        state = RequestState(request, self._num_arrivals, rank, min(request.sampling.max_tokens, room))
        self._tenants.add(state)
        return state

    def _room(self, request: Request) -> int:
        """How many tokens may be generated."""
        prompt_len = len(request.prompt_token_ids)
        room = self._max_model_len - prompt_len
        if not prompt_len:
            raise InvalidRequestError("prompt: got no tokens; allowed: at least one token")
        if room < 1:
            allowed = f"at most {self._max_model_len - 1} tokens (max_model_len {self._max_model_len}, output included)"
            raise InvalidRequestError(f"prompt: got {prompt_len} tokens; allowed: {allowed}")
        return room

    def _queue_is_full(self, num_more: int) -> bool:
        return self.num_waiting + num_more > self._config.max_queue_size + self._seats.num_free

    def _may_displace(self, salt: str) -> bool:
        share = self._tenants.share(self._config.max_queue_size, newcomer=salt)
        largest = self._tenants.most_refusable()
        return largest is not None and self._tenants.num_refusable(salt) < share < len(largest.refusable)

    def displaced(self) -> RequestState | None:
        """To be asked once after `add`: who is to be refused, as a tenant with less in the queue took the place.

        It is the worst-ranked of the requests that never ran, of the tenant with most of them. The caller ends it.
        """
        largest = self._tenants.most_refusable()
        return largest.refusable.least() if largest and self._queue_is_full(0) else None

    def schedule(self) -> SchedulerOutput:
        """The plan of the next step; empty where nothing can run."""
        front = self._tenants.front
        plan = StepPlan(self._config.max_num_batched_tokens, front)
        if front is not None:
            if not front.running:
                self._seats.start_front(front, plan)
            self._give(front, 1, plan)
            self._give_last_tokens(plan)
            self._give_prompts(plan)
        self._step += 1
        finished, self._finished_ids = tuple(self._finished_ids), []
        return plan.close(self._step, finished)

    def _give_last_tokens(self, plan: StepPlan) -> None:
        last = (state for state in self._running if state.num_computed_tokens + 1 == state.num_tokens)
        for state in sorted(last, key=lambda state: state.rank):
            if state.running and state is not plan.front:
                self._give(state, 1, plan)

    def _give_prompts(self, plan: StepPlan) -> None:
        line = PromptLine(self._tenants, filter(plan.num_left, self._running), self._seats)
        while plan.budget > 0 and (state := line.next()):
            if not state.running and not self._seats.start(state, plan):
                plan.in_order = False
                line.set_aside(state)
                if plan.nothing_to_claim:
                    line.close()
            elif count := min(plan.num_left(state), plan.budget, _most_at_once(state) - plan.num_given(state)):
                self._give(state, count, plan)
        self._tenants.end_step()

    def _give(self, state: RequestState, count: int, plan: StepPlan) -> None:
        """`count` more tokens of a running request; none where it is itself preempted for lack of blocks."""
        num_tokens = state.num_computed_tokens + plan.num_given(state) + count
        blocks = self._seats.grow(state, num_tokens, plan)
        if blocks is not None:
            plan.give(state, count, blocks)
            self._tenants.charge(state, count)

    def preempt_worst(self) -> RequestState:
        """Preempt the worst-ranked running request, between two steps."""
        state = max(self._running, key=lambda state: state.rank)
        self._seats.preempt(state)
        return state

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Advance]:
        """Take in what a step computed. Requests that it ended are still to be finished by the caller."""
        for row in plan.scheduled:
            if state := self._seats.running.get(row.request_id):
                state.num_computed_tokens = row.num_computed_tokens + row.num_scheduled_tokens
        advances = []
        for token in result.sampled:
            if state := self._seats.running.get(token.request_id):
                if token.fault is None:
                    state.output_token_ids.append(token.token_id)
                reason = self._finish_reason(state) if token.fault is None else None
                advances.append(Advance(state, token.token_id, reason, token.fault, token.logprobs))
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
        self._seats.leave(state)
        self._tenants.remove(state)
        if state.known_to_executor:
            self._finished_ids.append(state.request_id)
        state.status = RequestStatus.FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError where the scheduler's books and the block tables disagree."""
        self._tenants.check_integrity()
        self._seats.check_integrity()
        running = {state for state in self.requests() if state.running}
        assert running == set(self._running), "running requests disagree"


def _most_at_once(state: RequestState) -> int:
    """How long a chunk of its prompt may be. What is told of a position costs as much as several positions of a model,
    and others wait for the step."""
    telling = state.request.sampling.prompt_logprobs is not None and not state.output_token_ids
    return _TOLD_TOKENS if telling else state.num_tokens
