"""Tenant: what one cache_salt has in the engine. Changed by Tenants alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereid.scheduling.keyed_heap import KeyedHeap
from nereid.scheduling.request_state import Rank, RequestState

Turn = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's sequences. num_running: resting ones that have a seat too.  unfinished: those that do not rest.
    refusable: the leaders that wait and were never scheduled, the worst-ranked first."""

    salt: str
    num_served_tokens: int = 0
    num_running: int = 0
    unfinished: KeyedHeap[RequestState, Rank] = field(default_factory=KeyedHeap)
    waiting: KeyedHeap[RequestState, Rank] = field(default_factory=KeyedHeap)
    refusable: KeyedHeap[RequestState, Rank] = field(default_factory=KeyedHeap)
    resting: set[RequestState] = field(default_factory=set)

    @property
    def best(self) -> RequestState:
        """Its best-ranked unfinished sequence that does not rest."""
        best = self.unfinished.least()
        assert best is not None, "a tenant without requests is not kept"
        return best

    @property
    def turn(self) -> Turn:
        """Less comes first."""
        return self.num_served_tokens, self.num_running, self.best.arrival
