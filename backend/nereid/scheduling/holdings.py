"""Holdings: what each tenant's running requests hold of the seats and blocks, and who gives some back.

Made for one decision, and not kept. A request holds one seat, and the blocks that its known tokens take when all of
them are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

from nereid.scheduling.request_state import RequestState


class Resource(Enum):
    """What running requests hold."""

    SEATS = auto()
    BLOCKS = auto()


class Holdings:
    """Running requests by tenant. Whoever is taken from here counts as gone."""

    def __init__(
        self, running: Iterable[RequestState], front: RequestState | None, num_blocks_of: Callable[[RequestState], int]
    ) -> None:
        """front: holds what it holds, but is never taken."""
        self._front = front
        self._num_blocks_of = num_blocks_of
        self._states: dict[str, list[RequestState]] = {}
        for state in sorted(running, key=lambda state: state.rank):
            self._states.setdefault(state.salt, []).append(state)

    def of(self, salt: str, resource: Resource) -> int:
        """How much of a resource a tenant holds."""
        states = self._states.get(salt, ())
        return len(states) if resource is Resource.SEATS else sum(map(self._num_blocks_of, states))

    def take_over_share(self, resource: Resource, share: int, *, spare_last: bool) -> RequestState | None:
        """The worst-ranked request of the tenant that holds most, where that is more than `share`; else None.

        spare_last: no tenant loses its last running request.
        """
        held = {salt: self.of(salt, resource) for salt, states in self._states.items() if self._takeable(states)}
        for salt in sorted(held, key=held.__getitem__, reverse=True):
            if held[salt] <= share:
                break
            if len(self._states[salt]) > spare_last:
                return self._take(self._takeable(self._states[salt])[-1])
        return None

    def take_worst(self) -> RequestState:
        """The worst-ranked request of all."""
        candidates = [state for states in self._states.values() for state in self._takeable(states)]
        return self._take(max(candidates, key=lambda state: state.rank))

    def _takeable(self, states: list[RequestState]) -> list[RequestState]:
        return [state for state in states if state is not self._front]

    def _take(self, state: RequestState) -> RequestState:
        self._states[state.salt].remove(state)
        return state
