"""StepPlan: the plan of a step while it is made, from an empty one to the SchedulerOutput.

Invariants: budget + the tokens of all rows == the step's whole budget; nothing is told to the executor that was
withdrawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereid.batch import BlockIds, NewRequest, ScheduledRequest, SchedulerOutput
from nereid.scheduling.holdings import Holdings
from nereid.scheduling.request_state import RequestState


@dataclass(slots=True)
class _Row:
    state: RequestState
    num_tokens: int
    new_block_ids: BlockIds

    def as_data(self) -> ScheduledRequest:
        state = self.state
        samples = state.num_computed_tokens + self.num_tokens == state.num_tokens
        return ScheduledRequest(
            state.request_id, state.num_computed_tokens, self.num_tokens, self.new_block_ids, state.restarting, samples
        )


class StepPlan:
    """Rows in the order in which requests were first given tokens.

    front: the request that must advance.  num_spare_blocks: free blocks that no running request needs for its known
    tokens, below zero where they want more than there are.  holdings: of the running requests. Both None until somebody
    asks.  in_order: no waiting request was passed over yet.  nothing_to_claim: nor can one be, by a claim.
    """

    def __init__(self, budget: int, front: RequestState | None) -> None:
        self.budget = budget
        self.front = front
        self.num_spare_blocks: int | None = None
        self.holdings: Holdings | None = None
        self.in_order = True
        self.nothing_to_claim = False
        self._rows: dict[int, _Row] = {}

    def num_given(self, state: RequestState) -> int:
        """Tokens that the request was given so far."""
        row = self._rows.get(state.request_id)
        return row.num_tokens if row else 0

    def num_left(self, state: RequestState) -> int:
        """Tokens of the request that would still have to be computed after this step."""
        return state.num_tokens - state.num_computed_tokens - self.num_given(state)

    def give(self, state: RequestState, num_tokens: int, blocks: BlockIds) -> None:
        """More tokens for a request, and the blocks that it got for them."""
        self.budget -= num_tokens
        row = self._rows.get(state.request_id)
        if row is None:
            self._rows[state.request_id] = _Row(state, num_tokens, blocks)
            return
        row.num_tokens += num_tokens
        row.new_block_ids = tuple(old + new for old, new in zip(row.new_block_ids, blocks, strict=True))

    def withdraw(self, state: RequestState) -> int:
        """Take a request out; returns the number of tokens that it had been given."""
        row = self._rows.pop(state.request_id, None)
        num_tokens = row.num_tokens if row else 0
        self.budget += num_tokens
        return num_tokens

    def close(self, step: int, finished_ids: tuple[int, ...]) -> SchedulerOutput:
        """The plan as data. Its requests are known to the executor from now on, as they are in it."""
        states = [row.state for row in self._rows.values()]
        new_requests = tuple(
            NewRequest(state.request_id, state.request.prompt_token_ids, state.request.sampling)
            for state in states
            if not state.known_to_executor
        )
        output = SchedulerOutput(step, new_requests, tuple(row.as_data() for row in self._rows.values()), finished_ids)
        for state in states:
            state.known_to_executor = True
            state.restarting = False
        return output
