"""PromptLine: in which order requests get prompt tokens computed, in one step.

Running requests whose prompts are not computed yet and waiting ones stand in one line: the tenant whose turn it is
comes first, and of a tenant the best-ranked request. So neither the chunks of a flood of long prompts nor its queue
come before another tenant's first chunk. But waiting requests of a tenant that has its share of the seats stand back
while a tenant with less waits, so that no seat is given out only to be claimed.

Who cannot start for lack of room keeps its tenant's others back, for they would take the room. Who only waits for what
another computes is passed over: it is the first again in the next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from nereid.scheduling.request_state import RequestState
from nereid.scheduling.seats import Seats
from nereid.scheduling.tenant import Tenant
from nereid.scheduling.tenants import Tenants

_MOST_PASSED_OVER = 16  # in a step, since each is matched anew in every one


class PromptLine:
    """The line of one step. It costs as much as there are running requests in it, however many wait."""

    def __init__(self, tenants: Tenants, unfilled: Iterable[RequestState], seats: Seats) -> None:
        """unfilled: running requests with tokens left to compute.

        Once as many tenants as there are seats were set aside, nobody who waits comes any more.
        """
        self._tenants = tenants
        self._num_may_be_set_aside = seats.num_seats
        self._num_may_be_passed_over = _MOST_PASSED_OVER
        self._share = tenants.share(seats.num_seats)
        self._unfilled: dict[Tenant, list[RequestState]] = {}
        for state in sorted(unfilled, key=lambda state: state.rank, reverse=True):
            self._unfilled.setdefault(tenants[state], []).append(state)
        tenants.raise_floor(self._first_tenant())
        if not seats.may_be_had:
            self.close()

    def next(self) -> RequestState | None:
        """Who is next. A running request comes once, a waiting one until it was started, set aside or passed over."""
        while tenant := self._first_tenant():
            unfilled = self._unfilled.get(tenant)
            waiting = self._tenants.next_waiting_of(tenant) if self._open else None
            if unfilled and (waiting is None or unfilled[-1].rank <= waiting.rank):
                state = unfilled.pop()
                if not unfilled:
                    del self._unfilled[tenant]
                if state.running:  # else it was preempted in this step, and waits
                    return state
            elif tenant.num_running < self._share or not self._tenants.any_waits_with_fewer_running(self._share):
                return waiting
            else:
                self._tenants.set_aside(tenant)
        return None

    @property
    def _open(self) -> bool:
        return self._num_may_be_set_aside > 0

    def _first_tenant(self) -> Tenant | None:
        candidates = list(self._unfilled)
        if self._open and (tenant := self._tenants.next_with_waiting()):
            candidates.append(tenant)
        return min(candidates, key=lambda tenant: tenant.turn, default=None)

    def set_aside(self, state: RequestState) -> None:
        """A waiting request cannot start; nor can its tenant's others in this step, which are ranked worse."""
        self._tenants.set_aside(self._tenants[state])
        self._num_may_be_set_aside -= 1

    def pass_over(self, state: RequestState) -> None:
        """A waiting request waits for more than room; its tenant's others may start, while not too many have been
        passed over in this step."""
        if self._num_may_be_passed_over:
            self._num_may_be_passed_over -= 1
            self._tenants.pass_over(state)
        else:
            self.set_aside(state)

    def close(self) -> None:
        """Nobody who waits comes any more."""
        self._num_may_be_set_aside = 0
