"""Seats: who runs, and whom it costs. Owns the running requests, and gives them blocks.

A waiting request starts where a seat is free and the pool has the blocks for all its known tokens beside those that
running requests still need. Where one cannot, none behind it starts either, but by a claim: a request that never ran,
of a tenant with fewer running requests than its share of the seats, takes what it lacks from the worst-ranked requests
of tenants above their shares; blocks only up to its own tenant's share of them, and all of them where others wait
before it; nothing from the front request, nor a tenant's last running one. A request claims at most once, when it first
starts: there are no more claims than requests, so nothing goes to and fro.

Where a running request finds no block, one is preempted and recomputed later: the worst-ranked of the tenant that holds
most, where that is above its share and not its last; else of the tenants' worst-ranked ones the latest arrival; never
the front.

Invariants: there are no more running requests than seats; only they have blocks.
"""

from __future__ import annotations

from nereid.batch import BlockIds
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import RequestStatus
from nereid.scheduling.holdings import Holdings, Resource
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.step_plan import StepPlan
from nereid.scheduling.tenants import Tenants


class Seats:
    """`num_seats` places for running requests, and the block pool that they share."""

    def __init__(self, num_seats: int, kv_cache: KVCacheManager, tenants: Tenants) -> None:
        self.num_seats = num_seats
        self._kv_cache = kv_cache
        self._tenants = tenants
        self.running: dict[int, RequestState] = {}  # by request id; changed here alone
        self.num_preemptions = 0

    @property
    def num_free(self) -> int:
        return self.num_seats - len(self.running)

    @property
    def may_be_had(self) -> bool:
        """Whether anybody who waits could start: a seat is free, or a tenant has more than its share."""
        return self.num_free > 0 or self._tenants.most_running > self._tenants.share(self.num_seats)

    def start(self, state: RequestState, plan: StepPlan) -> bool:
        """Let a waiting request run, where there is room or it may claim some. Returns whether it runs."""
        num_blocks = self._num_missing_blocks(state)
        if not (plan.in_order and self.num_free and num_blocks <= self._num_spare_blocks(plan)):
            victims = self._claimed(state, num_blocks, plan)
            if victims is None:
                return False
            for victim in victims:
                self._preempt(victim, plan)
        self._start(state, plan)
        return True

    def start_front(self, front: RequestState, plan: StepPlan) -> None:
        """Let the front request run, which takes a seat from another where none is free."""
        if not self.num_free:
            self._preempt(self._victim(Resource.SEATS, self.num_seats, plan), plan)
        self._start(front, plan)

    def grow(self, state: RequestState, num_tokens: int, plan: StepPlan) -> BlockIds | None:
        """Blocks for a running request's first `num_tokens` tokens; None where it was itself preempted to make room."""
        while (blocks := self._kv_cache.grow(state.request_id, num_tokens)) is None:
            victim = self._victim(Resource.BLOCKS, self._kv_cache.num_blocks, plan)
            self._preempt(victim, plan)
            if victim is state:
                return None
        return blocks

    def leave(self, state: RequestState) -> None:
        """A request has ended, running or not."""
        self.running.pop(state.request_id, None)
        self._kv_cache.free(state.request_id)

    def preempt(self, state: RequestState) -> None:
        """Take a running request's seat and blocks; it is recomputed when there is room again."""
        del self.running[state.request_id]
        self._kv_cache.free(state.request_id)
        state.status = RequestStatus.PREEMPTED
        state.num_computed_tokens = 0
        state.restarting = state.known_to_executor
        self._tenants.stop(state)
        self.num_preemptions += 1

    def _preempt(self, state: RequestState, plan: StepPlan) -> None:
        """The same in the middle of a plan, in which it may have a part."""
        self._tenants.charge(state, -plan.withdraw(state))
        self.preempt(state)
        plan.num_spare_blocks = plan.holdings = None

    def _start(self, state: RequestState, plan: StepPlan) -> None:
        plan.num_spare_blocks = self._num_spare_blocks(plan) - self._num_missing_blocks(state)
        self._tenants.start(state)
        self.running[state.request_id] = state
        state.status = RequestStatus.RUNNING
        plan.holdings = None

    def _victim(self, resource: Resource, total: int, plan: StepPlan) -> RequestState:
        """Who makes room for a running request, or for the front."""
        holdings = self._holdings(plan)
        return holdings.above_share(resource, self._tenants.share(total)) or holdings.latest()

    def _claimed(self, state: RequestState, num_blocks: int, plan: StepPlan) -> list[RequestState] | None:
        """Whom to preempt for a waiting request that needs so many blocks; None where it has no claim to that."""
        seats, blocks = self._tenants.share(self.num_seats), self._tenants.share(self._kv_cache.num_blocks)
        num_free, num_spare = self.num_free, self._num_spare_blocks(plan) if plan.in_order else 0
        if state.status is not RequestStatus.WAITING or self._tenants[state].num_running >= seats:
            return None
        victims: list[RequestState] = []
        while not num_free or num_blocks > num_spare:
            resource, share = (Resource.BLOCKS, blocks) if num_free else (Resource.SEATS, seats)
            victim = self._holdings(plan).above_share(resource, share, victims)
            if victim is None:
                plan.nothing_to_claim = not victims
                return None
            if num_free and num_blocks + self._holdings(plan).num_blocks(state.salt) > blocks:
                return None
            victims.append(victim)
            num_free += 1
            num_spare += self._num_blocks_of(victim)
        return victims

    def _holdings(self, plan: StepPlan) -> Holdings:
        if plan.holdings is None:
            plan.holdings = Holdings(self.running.values(), plan.front, self._num_blocks_of)
        return plan.holdings

    def _num_blocks_of(self, state: RequestState) -> int:
        return self._kv_cache.num_blocks_for(state.num_tokens)

    def _num_spare_blocks(self, plan: StepPlan) -> int:
        if plan.num_spare_blocks is None:  # giving blocks to who is running does not change it
            missing = sum(map(self._num_missing_blocks, self.running.values()))
            plan.num_spare_blocks = self._kv_cache.num_free_blocks - missing
        return plan.num_spare_blocks

    def _num_missing_blocks(self, state: RequestState) -> int:
        return self._kv_cache.num_missing_blocks(state.request_id, state.num_tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError where running requests and the block tables disagree."""
        self._kv_cache.check_integrity()
        assert len(self.running) <= self.num_seats, "more running requests than seats"
        assert set(self._kv_cache.tables) <= set(self.running), "blocks without a running request"
        for state in self.running.values():
            assert state.running and state.num_computed_tokens <= state.num_tokens, f"{state.request_id}: {state}"
            self._kv_cache.check_holds(state.request_id, state.num_computed_tokens)
