"""Tenants: who has requests, how much each has been served, and what of each waits. Owns the waiting queues.

A tenant is whoever shares a cache_salt. As with the virtual token counter (Sheng et al., "Fairness in Serving Large
Language Models", 2024), each has a count of the tokens computed for it, recomputation included, for it is the device's
time that is shared. Who comes to wait starts at the floor, the least count of those whose prompts were in line in the
step before, so that idling saves nothing up; where none were in line, at the greatest count, so that all start even.

A sequence that has nothing to compute until others of its request are through rests: it is not in line, and nobody's
best. Invariants: only tenants with unfinished requests are kept, and of each some sequence does not rest; whose turn is
next is the tenant with the least count (of equals the one with fewer running requests, then the one whose best-ranked
request arrived first); within a tenant, the best-ranked waiting request is next. Every change costs O(log n).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from operator import attrgetter

from nereid.scheduling.keyed_heap import KeyedHeap
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.tenant import Tenant, Turn

_SALT = attrgetter("salt")


class Tenants:
    """All tenants with unfinished requests."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        # Those with waiting requests that are not set aside: by turn, and by how many run.
        self._line: KeyedHeap[Tenant, Turn] = KeyedHeap()
        self._line_by_running: KeyedHeap[Tenant, int] = KeyedHeap()
        # All: by the arrival of the best-ranked request, by how many run and how many can be refused (most first).
        self._by_best: KeyedHeap[Tenant, int] = KeyedHeap()
        self._by_most_running: KeyedHeap[Tenant, int] = KeyedHeap()
        self._by_most_refusable: KeyedHeap[Tenant, int] = KeyedHeap()
        self._aside: set[Tenant] = set()
        self._passed: list[RequestState] = []  # they wait, and are out of their tenants' queues for now
        self._charged: set[Tenant] = set()  # their places in the order of turns are out of date
        self._floor = 0
        self.num_waiting = 0  # sequences
        self.num_queued = 0  # requests: those whose leaders wait

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __getitem__(self, state: RequestState) -> Tenant:
        """Whose request `state` is."""
        return self._tenants[state.salt]

    @property
    def most_running(self) -> int:
        """Running requests of the tenant that has most."""
        tenant = self._by_most_running.least()
        return tenant.num_running if tenant else 0

    def any_waits_with_fewer_running(self, share: int) -> bool:
        """Whether a tenant has waiting requests, is not set aside and has fewer than `share` running ones."""
        tenant = self._line_by_running.least()
        return tenant is not None and tenant.num_running < share

    def num_refusable(self, salt: str) -> int:
        """How many requests of a tenant wait and were never scheduled."""
        tenant = self._tenants.get(salt)
        return len(tenant.refusable) if tenant else 0

    def share(self, total: int, newcomer: str | None = None) -> int:
        """A tenant's part of `total` things, at least one; `newcomer` counts as active too where it is given."""
        others = newcomer is not None and newcomer not in self._tenants
        return max(1, total // max(1, len(self._tenants) + others))

    @property
    def front(self) -> RequestState | None:
        """The request that advances in every step: of the tenants' best-ranked ones the first to arrive.

        Every request gets there: of its own tenant only those with better ranks, of others only earlier arrivals are
        in front of it, and both are finitely many. A priority moves no tenant past another.
        """
        tenant = self._by_best.least()
        return tenant.best if tenant else None

    def next_with_waiting(self) -> Tenant | None:
        """Whose waiting request is next, of the tenants that are not set aside."""
        self._settle()
        return self._line.least()

    def next_waiting_of(self, tenant: Tenant) -> RequestState | None:
        """Its best-ranked waiting request, where it is not set aside."""
        return None if tenant in self._aside else tenant.waiting.least()

    def most_refusable(self) -> Tenant | None:
        """The tenant with most of them."""
        return self._by_most_refusable.least()

    def add(self, state: RequestState) -> None:
        """A new request, which waits."""
        if (tenant := self._tenants.get(state.salt)) is None:
            tenant = self._tenants[state.salt] = Tenant(state.salt)
        tenant.unfinished.put(state, state.rank)
        self._queue(tenant, state)
        self._refresh(tenant)

    def start(self, state: RequestState) -> None:
        """A waiting request runs now."""
        tenant = self[state]
        self._unqueue(tenant, state)
        tenant.num_running += 1
        self._refresh(tenant)

    def stop(self, state: RequestState) -> None:
        """A running request waits again, or rests without a seat."""
        tenant = self[state]
        tenant.num_running -= 1
        if state not in tenant.resting:
            self._queue(tenant, state)
        self._refresh(tenant)

    def rest(self, state: RequestState) -> None:
        """A sequence that does not wait, or a new one, has nothing to compute; another of its request has."""
        tenant = self[state]
        tenant.unfinished.discard(state)
        tenant.resting.add(state)
        self._refresh(tenant)

    def rouse(self, state: RequestState) -> None:
        """A sequence has something to compute again, if it rested: it waits, where it does not run."""
        tenant = self[state]
        if state not in tenant.resting:
            return
        tenant.resting.discard(state)
        tenant.unfinished.put(state, state.rank)
        if not state.running:
            self._queue(tenant, state)
        self._refresh(tenant)

    def rests(self, state: RequestState) -> bool:
        return state in self[state].resting

    def is_next(self, state: RequestState) -> bool:
        """Whether a waiting sequence is its tenant's next."""
        return self[state].waiting.least() is state

    def remove(self, state: RequestState) -> None:
        """A request has ended, wherever it stood."""
        tenant = self[state]
        if state in tenant.waiting:
            self._unqueue(tenant, state)
        elif state.running:
            tenant.num_running -= 1
        tenant.unfinished.discard(state)
        tenant.resting.discard(state)
        if tenant.unfinished:
            self._refresh(tenant)
            return
        for by_number in (self._line_by_running, self._by_best, self._by_most_running, self._by_most_refusable):
            by_number.discard(tenant)
        self._line.discard(tenant)
        self._charged.discard(tenant)
        del self._tenants[tenant.salt]

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """Count tokens computed for a request; below zero where they were not, after all."""
        tenant = self[state]
        tenant.num_served_tokens += num_tokens
        self._charged.add(tenant)

    def charge_each(self, states: Collection[RequestState]) -> None:
        """Count one token computed for each."""
        salts = Counter(map(_SALT, states)) if len(self) > 1 else dict.fromkeys(self._tenants, len(states))
        for salt, num_tokens in salts.items():
            tenant = self._tenants[salt]
            tenant.num_served_tokens += num_tokens
            self._charged.add(tenant)

    def raise_floor(self, first: Tenant | None) -> None:
        """Before a step's prompts are given tokens; first: the tenant whose turn it is, None where none is in line."""
        counts = [first.num_served_tokens] if first else [tenant.num_served_tokens for tenant in self]
        self._floor = max(self._floor, *counts)

    def set_aside(self, tenant: Tenant) -> None:
        """Leave its waiting requests out of the order until `end_step`."""
        self._aside.add(tenant)
        self._refresh(tenant)

    def pass_over(self, state: RequestState) -> None:
        """Leave one waiting request out of its tenant's queue until `end_step`."""
        self._passed.append(state)
        self[state].waiting.discard(state)
        self._refresh(self[state])

    def end_step(self) -> None:
        """Nobody is set aside or passed over any more."""
        changed, self._aside = self._aside, set()
        passed, self._passed = self._passed, []
        for state in passed:
            self[state].waiting.put(state, state.rank)
            changed.add(self[state])
        for tenant in changed:
            self._refresh(tenant)

    def _settle(self) -> None:
        while self._charged:
            self._refresh(self._charged.pop())

    def _queue(self, tenant: Tenant, state: RequestState) -> None:
        if not tenant.waiting:
            tenant.num_served_tokens = max(tenant.num_served_tokens, self._floor)
        tenant.waiting.put(state, state.rank)
        if state.leader is None and not state.known_to_executor:
            tenant.refusable.put(state, (-state.rank[0], -state.rank[1]))
        self.num_waiting += 1
        self.num_queued += state.leader is None

    def _unqueue(self, tenant: Tenant, state: RequestState) -> None:
        tenant.waiting.discard(state)
        tenant.refusable.discard(state)
        self.num_waiting -= 1
        self.num_queued -= state.leader is None

    def _refresh(self, tenant: Tenant) -> None:
        self._by_best.put(tenant, tenant.best.arrival)
        self._by_most_running.put(tenant, -tenant.num_running)
        self._by_most_refusable.put(tenant, -len(tenant.refusable))
        if tenant.waiting and tenant not in self._aside:
            self._line.put(tenant, tenant.turn)
            self._line_by_running.put(tenant, tenant.num_running)
        else:
            self._line.discard(tenant)
            self._line_by_running.discard(tenant)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books of the tenants and the requests' own states disagree."""
        self._settle()
        assert not self._aside and not self._passed, "somebody stands back between two steps"
        assert self.num_waiting == sum(len(tenant.waiting) for tenant in self), "waiting requests miscounted"
        assert set(self._by_best) == set(self._by_most_refusable) == set(self), "tenants missing"
        with_waiting = {tenant for tenant in self if tenant.waiting}
        assert set(self._line) == set(self._line_by_running) == with_waiting, "tenants missing in line"
        for tenant in self:
            running = {state for state in (*tenant.unfinished, *tenant.resting) if state.running}
            assert not tenant.resting & set(tenant.unfinished), f"tenant {tenant.salt!r}: one rests and does not"
            assert tenant.num_running == len(running), f"tenant {tenant.salt!r}: running requests miscounted"
            assert set(tenant.waiting) == set(tenant.unfinished) - running, f"tenant {tenant.salt!r}: lost one"
            new = {state for state in tenant.waiting if not (state.known_to_executor or state.leader)}
            assert set(tenant.refusable) == new, f"tenant {tenant.salt!r}: others can be refused"
            assert self._by_best.key_of(tenant) == tenant.best.arrival, f"tenant {tenant.salt!r}: not in its place"
            if tenant.waiting:
                assert self._line.key_of(tenant) == tenant.turn, f"tenant {tenant.salt!r}: not at its turn"
