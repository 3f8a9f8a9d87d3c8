"""Scheduler: who runs in the next step, and with how many tokens. Owns every request's state; sees no tensor.

There is no prefill phase and no decode phase: a request has `num_computed_tokens`, which chases `num_tokens`, and a
step gives it a share of one token budget. A running request has a seat; there are no more seats than tokens in a step.
A step's tokens go
1. to the front request (`Tenants.front`): one, at whatever cost to others, so that it always advances;
2. to the requests with one token left to compute: no prompt stalls a stream;
3. to prompts, as many as `Pacing` allows where streams wait for the step, running and waiting requests alike, as
   `PromptLine` orders them: tenants by what they were served, requests by rank. A rank is the arrival plus what the
   priority is worth in waiting; it never changes, so who awaits room alone is overtaken only by those that arrive
   within (difference of priorities) x priority_ageing_ms after it.

Where the blocks come from, and at whose cost, `Seats` decides. The front request advances in every step until it ends,
and as everybody gets to the front, everybody ends.

Invariants: a waiting request has no blocks; nothing waits that could never run (it was refused by `add`); the front
request is in every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from nereid.batch import DrawFault, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import FinishReason, Request, RequestStatus, TokenLogprobs
from nereid.scheduling.beam_search import Hypothesis
from nereid.scheduling.beams import Beams, SearchAdvance
from nereid.scheduling.intake import Intake
from nereid.scheduling.pacing import Pacing
from nereid.scheduling.prompt_line import PromptLine
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.seats import Seats
from nereid.scheduling.step_plan import StepPlan
from nereid.scheduling.tenants import Tenants

__all__ = ["Advance", "RequestState", "Scheduler", "SearchAdvance"]

_TOLD_TOKENS = 64  # of a prompt whose logprobs are told, in one step


class Advance(NamedTuple):  # NOTE: there is one a token, and a dataclass takes longer to make
    """What a step brought one sequence: a token, or the reason why none could be drawn."""

    state: RequestState
    token_id: int
    finish_reason: FinishReason | None = None
    fault: DrawFault | None = None
    logprobs: TokenLogprobs | None = None


_advance = partial(tuple.__new__, Advance)  # of all its fields, in half the time that the class takes


class Scheduler:
    """Waiting and running requests under one token budget a step."""

    def __init__(
        self, config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """max_model_len: most tokens of a prompt and its output together; at most what the pool holds."""
        self._budget = config.max_num_batched_tokens
        self._tenants = Tenants()
        self._kv_cache = kv_cache
        self._seats = Seats(min(config.max_num_seqs, config.max_num_batched_tokens), kv_cache, self._tenants)
        self._intake = Intake(config, max_model_len, frozenset(eos_token_ids), self._seats, self._tenants)
        self._beams = Beams(self._seats, self._tenants)
        self._pacing = Pacing(None if config.target_itl_ms is None else config.target_itl_ms / 1e3)
        self._finished_ids: list[int] = []
        self._step = 0

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
        return (state for tenant in self._tenants for state in (*tenant.unfinished, *tenant.resting))

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> RequestState:
        """Queue a request. Raises QueueFullError, or InvalidRequestError where it could never run.

        siblings: the request as its other sequences see it, each under an id of its own.  Returns the leader.
        Where the queue is full and the request's tenant has less than its share of it, the request is taken all the
        same: `displaced` then tells who is to be refused in its stead.
        """
        leader = self._intake.take(request, siblings)
        self._beams.add(leader)
        return leader

    def displaced(self) -> RequestState | None:
        """To be asked once after `add`: who is to be refused, as a tenant with less in the queue took the place.

        It is the worst-ranked of the requests that never ran, of the tenant with most of them. The caller ends it.
        """
        return self._intake.displaced()

    def schedule(self) -> SchedulerOutput:
        """The plan of the next step; empty where nothing can run."""
        front = self._tenants.front
        plan = StepPlan(self._budget, front)
        if front is not None:
            others = self._give_steady(plan)
            if not front.running:
                self._seats.start_front(front, plan)
                others.append(front)
            if front.running and not plan.num_given(front):
                self._give(front, 1, plan)
            self._give_last_tokens(others, plan)
            if plan.has_streams:
                plan.budget = self._pacing.most_prompt_tokens(plan.budget)
            self._give_prompts(others, plan)
        self._step += 1
        finished, self._finished_ids = tuple(self._finished_ids), []
        return plan.close(self._step, finished, self._kv_cache)

    def _give_steady(self, plan: StepPlan) -> list[RequestState]:
        """The last token to each running request that needs nothing for it: they take nothing from anybody, there is
        room for them in any step, and they are many. Returns the other running requests."""
        last = [
            s
            for s in self._running
            if s.num_computed_tokens + 1 == s.num_tokens and s.first_given is None and not s.siblings
        ]
        steady, others = self._kv_cache.steady(last)
        plan.give_last(steady)
        self._tenants.charge_each(steady)
        if len(last) < self.num_running:
            others += set(self._running).difference(last)
        return others

    def _give_last_tokens(self, others: Sequence[RequestState], plan: StepPlan) -> None:
        for state in sorted(others, key=lambda state: state.rank):
            if state.running and state.num_computed_tokens + 1 == state.num_tokens and state is not plan.front:
                self._give(state, 1, plan)

    def _give_prompts(self, others: Sequence[RequestState], plan: StepPlan) -> None:
        line = PromptLine(self._tenants, (s for s in others if s.running and plan.num_left(s)), self._seats)
        # NOTE: who draws a first token where its leader does needs none of the budget.
        while (plan.budget > 0 or plan.forkable) and (state := line.next()):
            if not state.running:
                self._start(state, plan, line)
            if not state.running:
                continue
            if count := min(plan.num_left(state), plan.budget, _most_at_once(state) - plan.num_given(state)):
                self._give(state, count, plan)
        self._tenants.end_step()

    def _start(self, state: RequestState, plan: StepPlan, line: PromptLine) -> None:
        """Let a waiting request run, or stand back. Where another computes what it needs next, it alone stands back."""
        if (leader := state.leader) and leader in plan.forkable:
            plan.in_order = self._seats.fork(leader, state, plan) and plan.in_order
        elif leader and state.waits_for_leader:
            if not leader.running:  # else the seats left are kept for its sequences
                return line.pass_over(state)
        elif plan.budget:
            match = self._seats.match(state)
            if self._seats.awaits(state, match, plan):
                return line.pass_over(state)
            plan.in_order = self._seats.start(state, match, plan) and plan.in_order
        if not state.running:
            line.set_aside(state)
            if plan.nothing_to_claim:
                line.close()

    def _give(self, state: RequestState, count: int, plan: StepPlan) -> None:
        """`count` more tokens of a running request; none where it is itself preempted for lack of blocks."""
        num_tokens = state.num_computed_tokens + plan.num_given(state) + count
        if self._seats.grow(state, num_tokens, plan):
            plan.give(state, count)
            self._tenants.charge(state, count)
            if state.siblings and not plan.num_left(state) and state.is_waited_for:
                plan.forkable.add(state)

    def preempt_worst(self) -> RequestState:
        """Preempt the worst-ranked running request, between two steps."""
        state = max(self._running, key=lambda state: state.rank)
        self._seats.preempt(state)
        return state

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Advance]:
        """Take in what a step computed. Sequences that it ended are still to be finished by the caller. `search` is to
        follow."""
        self._kv_cache.loaded(result.failed_loads)
        running, any_search = self._seats.running, len(self._beams) > 0
        certain, advances = [], []
        if len(result.sampled) < len(plan.scheduled):  # NOTE: else all draw, and they are many
            for row in plan.scheduled:
                if not row.samples and (state := running.get(row.request_id)):
                    state.num_computed_tokens += row.num_scheduled_tokens
                    certain.append(state)
        for token in result.sampled:
            if state := running.get(token.request_id):
                state.num_computed_tokens = state.num_tokens
                if token.fault is not None:
                    self._kv_cache.discard(state.request_id)
                    advances.append(Advance(state, token.token_id, fault=token.fault))
                    continue
                certain.append(state)
                if any_search and state in self._beams:
                    self._beams.found(state, token)
                else:
                    token_id = token.token_id
                    advances.append(_advance((state, token_id, state.append(token_id), None, token.logprobs)))
        for state in self._kv_cache.to_publish(certain):
            self._kv_cache.publish(state.request_id, state, state.num_computed_tokens)
        return advances

    def took(self, plan: SchedulerOutput, seconds: float) -> None:
        """How long a step took from its beginning to the next one's."""
        if self._pacing.has_target:
            num_others = sum(row.num_scheduled_tokens == 1 for row in plan.scheduled)
            self._pacing.took(plan.num_scheduled_tokens - num_others, num_others, seconds)

    def search(self) -> list[SearchAdvance]:
        """After `update`: let beam searches go on. Requests whose searches ended are still to be ended."""
        return list(self._beams.go_on())

    def hypotheses(self, leader: RequestState) -> list[Hypothesis]:
        """The best of a request's beam search so far, as many as the request wants, or as there are."""
        return self._beams.best(leader)

    def end(self, leader: RequestState) -> None:
        """Forget what is left of a request."""
        self._beams.remove(leader)
        left = [s for s in (leader, *leader.siblings) if s.status is not RequestStatus.FINISHED]
        for state in sorted(left, key=self._tenants.rests, reverse=True):  # NOTE: the last of a tenant does not rest
            self.finish(state)

    def finish(self, state: RequestState) -> None:
        """Forget a sequence and give its blocks back, wherever it stands."""
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
