"""Holdings: what each tenant's running requests hold of the seats and blocks, and whom it hits to give some back.

A request holds one seat, and the blocks that its known tokens take when all of them are computed. Never hit are the
front request, and for the sake of shares a tenant's last running one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto

from nereid.scheduling.request_state import RequestState


class Resource(Enum):
    """What running requests hold."""

    SEATS = auto()
    BLOCKS = auto()


class Holdings:
    """Running requests by tenant, at one moment. `gone`: requests that are to count as preempted already."""

    def __init__(
        self, running: Iterable[RequestState], front: RequestState | None, num_blocks_of: Callable[[RequestState], int]
    ) -> None:
        self._front = front
        self._num_blocks = {state: num_blocks_of(state) for state in sorted(running, key=lambda state: state.rank)}
        self._states: dict[str, list[RequestState]] = {}
        for state in self._num_blocks:
            self._states.setdefault(state.salt, []).append(state)

    def num_blocks(self, salt: str) -> int:
        """The blocks that a tenant holds."""
        return self._amount(self._states.get(salt, ()), Resource.BLOCKS)

    def _amount(self, states: Collection[RequestState], resource: Resource) -> int:
        return len(states) if resource is Resource.SEATS else sum(map(self._num_blocks.__getitem__, states))

    def above_share(self, resource: Resource, share: int, gone: Collection[RequestState] = ()) -> RequestState | None:
        """The worst-ranked request of the tenant that holds most of a resource, where that is more than `share`."""
        most, victim = share, None
        for states in self._states.values():
            left = [state for state in states if state not in gone] if gone else states
            if len(left) > 1 and (amount := self._amount(left, resource)) > most:
                most, victim = amount, self._worst(left)
        return victim

    def latest(self) -> RequestState:
        """Of the tenants' worst-ranked requests the one that arrived last."""
        worst = filter(None, map(self._worst, self._states.values()))
        return max(worst, key=lambda state: state.arrival)

    def _worst(self, states: list[RequestState]) -> RequestState | None:
        return next((state for state in reversed(states) if state is not self._front), None)
