"""DueTimes: which requests have run out of time, found without looking at the others.

Invariant: a watched request is looked at no later than at its deadline, and while it was never scheduled, no later than
at the end of the queue timeout.
"""

from __future__ import annotations

from collections.abc import Iterator

from nereid.scheduling.keyed_heap import KeyedHeap
from nereid.scheduling.request_state import RequestState


class DueTimes:
    """The deadlines of requests, and how long they may wait to be scheduled for the first time."""

    def __init__(self, queue_timeout_s: float) -> None:
        self._queue_timeout_s = queue_timeout_s
        self._due: KeyedHeap[RequestState, float] = KeyedHeap()

    def watch(self, state: RequestState) -> None:
        """A request that was just queued."""
        latest_start = state.request.arrival_time + self._queue_timeout_s
        deadline = state.request.deadline
        self._due.put(state, latest_start if deadline is None else min(latest_start, deadline))

    def forget(self, state: RequestState) -> None:
        """A request that has ended."""
        self._due.discard(state)

    def expired(self, now: float) -> Iterator[RequestState]:
        """The requests whose deadline is not after `now`, and those that waited too long; each is then forgotten."""
        while (state := self._due.least()) and self._due.key_of(state) <= now:
            deadline = state.request.deadline
            if state.known_to_executor and deadline is not None and deadline > now:
                self._due.put(state, deadline)
                continue
            self._due.discard(state)
            if not state.known_to_executor or deadline is not None:
                yield state
