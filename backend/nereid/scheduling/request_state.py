"""RequestState: a request on its way through the scheduler. Changed by the scheduler's rooms alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereid.request import Request, RequestStatus

Rank = tuple[float, int]  # less is better


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. States are told apart by identity.

    arrival: ascending in the order in which the scheduler took requests.  rank: (arrival time + what its priority is
    worth in seconds of waiting, arrival): never changes, and no two are equal.  known_to_executor: it has been
    scheduled, so that the executor holds its prompt and tokens.  restarting: the executor still has the block table
    that it had before it was preempted.
    """

    request: Request
    arrival: int
    rank: Rank
    max_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    known_to_executor: bool = False
    restarting: bool = False

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def salt(self) -> str:
        """Whose request it is."""
        return self.request.cache_salt

    @property
    def running(self) -> bool:
        return self.status is RequestStatus.RUNNING

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)
