"""StepPlan: the plan of a step while it is made, from an empty one to the SchedulerOutput.

Invariants: the tokens of all rows are within the step's whole budget, of which `budget` is what may still be given;
nothing is told to the executor that was withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from nereid.batch import NewRequest, ScheduledRequest, SchedulerOutput, rows_of_last_tokens
from nereid.kv_cache.manager import KVCacheManager
from nereid.scheduling.holdings import Holdings
from nereid.scheduling.request_state import RequestState

_REQUEST_ID, _NUM_COMPUTED = attrgetter("request_id"), attrgetter("num_computed_tokens")


class StepPlan:
    """Which requests are given how many tokens.

    front: the request that must advance.  num_spare_blocks: free blocks that no running request needs for its known
    tokens, below zero where they want more than there are.  holdings: of the running requests. Both None until somebody
    asks.  in_order: no waiting request was passed over yet.  nothing_to_claim: nor can one be, by a claim.  forkable:
    leaders whose first tokens are drawn in this step, where others of their requests wait for that.
    """

    def __init__(self, budget: int, front: RequestState | None) -> None:
        self.budget = budget
        self.front = front
        self.num_spare_blocks: int | None = None
        self.holdings: Holdings | None = None
        self.in_order = True
        self.nothing_to_claim = False
        self.forkable: set[RequestState] = set()
        self._steady: dict[RequestState, int] = {}  # those of which only the last token is new; apart, as they are many
        self._given: dict[RequestState, int] = {}  # in the order in which they were first given tokens
        self._leaders: dict[RequestState, RequestState] = {}  # of those that draw their first token where another does

    @property
    def has_streams(self) -> bool:
        """Whether a request that has output already is given tokens."""
        return any(state.output_token_ids for states in (self._steady, self._given) for state in states)

    def num_given(self, state: RequestState) -> int:
        """Tokens that the request was given so far."""
        return self._given.get(state, 0) or self._steady.get(state, 0)

    def num_left(self, state: RequestState) -> int:
        """Tokens of the request that would still have to be computed after this step."""
        return state.num_tokens - state.num_computed_tokens - self.num_given(state)

    def give(self, state: RequestState, num_tokens: int) -> None:
        """More tokens for a request, for which it has the blocks."""
        self.budget -= num_tokens
        self._given[state] = self._given.get(state, 0) + num_tokens

    def give_last(self, steady: Iterable[RequestState]) -> None:
        """To requests that were given nothing yet their last token, of which the executor knows all else."""
        self._steady = dict.fromkeys(steady, 1)
        self.budget -= len(self._steady)

    def fork(self, leader: RequestState, state: RequestState) -> None:
        """A sequence that draws its first token where its leader does."""
        self._given[state], self._leaders[state] = 0, leader

    def forks_of(self, leader: RequestState) -> list[RequestState]:
        """The sequences that do so in this step."""
        return [state for state, other in self._leaders.items() if other is leader]

    def withdraw(self, state: RequestState) -> int:
        """Take a request out; returns the number of tokens that it had been given."""
        num_tokens = self._given.pop(state, 0) or self._steady.pop(state, 0)
        if leader := self._leaders.pop(state, None):  # the step was to compute the rest
            state.num_computed_tokens = leader.num_computed_tokens
        self.budget += num_tokens
        return num_tokens

    def close(self, step: int, finished_ids: tuple[int, ...], kv_cache: KVCacheManager) -> SchedulerOutput:
        """The plan as data. Its requests, and their block tables, are known to the executor from now on."""
        new_requests = tuple(
            NewRequest(state.request_id, state.request.prompt_token_ids, state.request.sampling, state.sequence_index)
            for state in self._given
            if not state.known_to_executor
        )
        rows = list(rows_of_last_tokens(map(_REQUEST_ID, self._steady), map(_NUM_COMPUTED, self._steady)))
        for state, num_tokens in self._given.items():
            state.known_to_executor = True
            rows.append(self._row(state, num_tokens, kv_cache))
        return SchedulerOutput(step, new_requests, tuple(rows), finished_ids, kv_cache.take_ops())

    def _row(self, state: RequestState, num_tokens: int, kv_cache: KVCacheManager) -> ScheduledRequest:
        samples = state.num_computed_tokens + num_tokens == state.num_tokens
        leader = self._leaders.get(state)
        return ScheduledRequest(
            state.request_id, state.num_computed_tokens, num_tokens, samples, *kv_cache.take_news(state.request_id),
            leader.request_id if leader else None, *state.take_given(),
        )  # fmt: skip
