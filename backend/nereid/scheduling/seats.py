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

from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.matching import Match
from nereid.request import RequestStatus
from nereid.scheduling.holdings import Holdings, Resource
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.step_plan import StepPlan
from nereid.scheduling.tenants import Tenants

_MOST_RESTORES = 100  # of one request; each reads what a step may


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

    def match(self, state: RequestState) -> Match:
        """What the prefix cache holds of a waiting request, now."""
        state.match = self._kv_cache.match(state.root, state, state.match)
        return state.match

    def awaits(self, state: RequestState, match: Match, plan: StepPlan) -> bool:
        """Whether a waiting request had better wait: what it lacks is being computed for another, or read from disk."""
        if self._kv_cache.awaits(match):
            return True
        restores = self._restores(state, match)
        if restores:  # into blocks that others are not to take
            plan.num_spare_blocks = None
        return restores

    def _restores(self, state: RequestState, match: Match) -> bool:
        # Bounded, since others may take the blocks that were read before the request can.
        restores = state.num_restores < _MOST_RESTORES and self._kv_cache.restore(state.root, state, match)
        state.num_restores += restores
        return restores

    def start(self, state: RequestState, match: Match, plan: StepPlan) -> bool:
        """Let a waiting request run, where there is room or it may claim some. Returns whether it runs."""
        num_blocks = self._kv_cache.num_needed_blocks(match, state.num_tokens)
        if not (plan.in_order and self.num_free and num_blocks <= self._num_spare_blocks(plan)):
            victims = self._claimed(state, num_blocks, plan)
            if victims is None:
                return False
            for victim in victims:
                self._preempt(victim, plan)
            match = self.match(state)  # NOTE: what the victims held may have been part of it
        self._start(state, match, plan)
        if plan.num_spare_blocks is not None:
            plan.num_spare_blocks -= num_blocks
        return True

    def fork(self, leader: RequestState, state: RequestState, plan: StepPlan) -> bool:
        """Let a waiting sequence draw its first token where its leader does in this step, where there is room. Returns
        whether it runs."""
        if not (plan.in_order and self.num_free and self._kv_cache.num_blocks_for(1) <= self._num_spare_blocks(plan)):
            return False
        self._branch(leader, state, leader.num_tokens)
        plan.fork(leader, state)
        plan.holdings = None
        if plan.num_spare_blocks is not None:
            plan.num_spare_blocks -= self._num_missing_blocks(state)
        return True

    def start_front(self, front: RequestState, plan: StepPlan) -> None:
        """Let the front request run, which takes a seat from another where none is free; unless it is being read."""
        if self._restores(front, self.match(front)):
            return
        if not self.num_free:
            self._preempt(self._victim(Resource.SEATS, self.num_seats, plan), plan)
        self._start(front, self.match(front), plan)

    def grow(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for a running request's first `num_tokens` tokens; false where it was itself preempted for them."""
        while (added := self._kv_cache.grow(state.request_id, state.num_computed_tokens, num_tokens)) is None:
            victim = self._victim(Resource.BLOCKS, self._kv_cache.num_blocks, plan)
            self._preempt(victim, plan)
            if victim is state:
                return False
        state.num_new_blocks += added
        return True

    def leave(self, state: RequestState) -> None:
        """A request has ended, running or not."""
        self.running.pop(state.request_id, None)
        self._kv_cache.free(state.request_id)

    def follow(self, source: RequestState, state: RequestState) -> None:
        """Between two steps: let a sequence that does not rest go on from where another of its request is, which has
        computed its tokens: with its blocks, where that one has any, and where this one has a seat or may have one.

        Of what this one had, nothing is kept: it was another hypothesis's.
        """
        if not source.running:
            self.dismiss(state)
            return
        self._kv_cache.free(state.request_id)
        if state.running:
            self._kv_cache.fork(source.request_id, state.request_id)
            state.num_computed_tokens = source.num_computed_tokens
        elif self._may_follow(state):
            self._branch(source, state, source.num_computed_tokens)

    def dismiss(self, state: RequestState) -> None:
        """Take what a sequence has, running or not; it is not needed any more."""
        self._kv_cache.free(state.request_id)
        if state.running:
            self._unseat(state)

    def _may_follow(self, state: RequestState) -> bool:
        """Whether a waiting sequence may have a seat, and a block to write into: nobody comes before it."""
        share = self._tenants.share(self.num_seats)
        in_turn = self._tenants[state].num_running < share or not self._tenants.any_waits_with_fewer_running(share)
        has_room = self.num_free > 0 and self._kv_cache.num_blocks_for(1) <= self._count_spare_blocks()
        return has_room and in_turn and self._tenants.is_next(state)

    def _branch(self, source: RequestState, state: RequestState, num_computed: int) -> None:
        """Let a waiting sequence run with the blocks of another."""
        self._kv_cache.fork(source.request_id, state.request_id)
        state.num_computed_tokens = num_computed
        self._seat(state)

    def preempt(self, state: RequestState) -> None:
        """Take a running request's seat and blocks; it goes on when there is room again."""
        self._kv_cache.preempt(state.request_id, state, state.num_computed_tokens)
        self._unseat(state)
        state.num_preemptions += 1
        self.num_preemptions += 1

    def _unseat(self, state: RequestState) -> None:
        del self.running[state.request_id]
        state.status = RequestStatus.PREEMPTED
        state.num_computed_tokens = 0
        self._tenants.stop(state)

    def _preempt(self, state: RequestState, plan: StepPlan) -> None:
        """The same in the middle of a plan, in which it may have a part, and others with it."""
        for fork in plan.forks_of(state):
            self._preempt(fork, plan)
        plan.forkable.discard(state)
        self._tenants.charge(state, -plan.withdraw(state))
        self.preempt(state)
        plan.num_spare_blocks = plan.holdings = None

    def _start(self, state: RequestState, match: Match, plan: StepPlan) -> None:
        before = self._kv_cache.num_allocated
        num_found = self._kv_cache.admit(state.request_id, state.root, state, match)
        state.num_new_blocks += self._kv_cache.num_allocated - before
        if state.status is RequestStatus.WAITING:
            state.num_cached_tokens = num_found
        state.num_computed_tokens = num_found
        self._seat(state)
        plan.holdings = None

    def _seat(self, state: RequestState) -> None:
        self._tenants.start(state)
        self.running[state.request_id] = state
        state.status, state.match = RequestStatus.RUNNING, None

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
            num_spare += self._kv_cache.num_own_blocks(victim.request_id) + self._num_missing_blocks(victim)
        return victims

    def _holdings(self, plan: StepPlan) -> Holdings:
        if plan.holdings is None:
            plan.holdings = Holdings(self.running.values(), plan.front, self._num_blocks_of)
        return plan.holdings

    def _num_blocks_of(self, state: RequestState) -> int:
        return self._kv_cache.num_blocks_for(state.num_tokens)

    def _num_spare_blocks(self, plan: StepPlan) -> int:
        if plan.num_spare_blocks is None:  # giving blocks to who is running does not change it
            plan.num_spare_blocks = self._count_spare_blocks()
        return plan.num_spare_blocks

    def _count_spare_blocks(self) -> int:
        return self._kv_cache.num_free_blocks - sum(map(self._num_missing_blocks, self.running.values()))

    def _num_missing_blocks(self, state: RequestState) -> int:
        return self._kv_cache.num_missing_blocks(state.request_id, state.num_computed_tokens, state.num_tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError where running requests and the block tables disagree."""
        self._kv_cache.check_integrity()
        assert len(self.running) <= self.num_seats, "more running requests than seats"
        assert set(self._kv_cache.tables) == set(self.running), "blocks without a running request"
        for state in self.running.values():
            assert state.running and state.num_computed_tokens <= state.num_tokens, f"{state.request_id}: {state}"
            self._kv_cache.check_holds(state.request_id, state.num_computed_tokens)
