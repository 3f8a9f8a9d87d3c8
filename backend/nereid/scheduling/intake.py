"""Intake: which requests are taken into the queue, and in whose stead. Owns the count of arrivals.

A request counts once in the queue, however many sequences it has: its leader has a place there, and the others come
along. So whatever the limits are, an idle engine takes any request that fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError, QueueFullError
from nereid.request import Request
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.seats import Seats
from nereid.scheduling.tenants import Tenants


class Intake:
    """The way into `Tenants`."""

    def __init__(
        self, config: EngineConfig, max_model_len: int, eos_token_ids: frozenset[int], seats: Seats, tenants: Tenants
    ) -> None:
        """max_model_len: most tokens of a prompt and its output together.  eos_token_ids: the model's own."""
        self._max_queue_size = config.max_queue_size
        self._ageing_s = config.priority_ageing_ms / 1e3
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._seats = seats
        self._tenants = tenants
        self._num_arrivals = 0

    def take(self, request: Request, siblings: Sequence[Request]) -> RequestState:
        """Queue a request; returns the leader. See `Scheduler.add`."""
        room = self._room(request)
        if self._is_full(1) and not self._may_displace(request.cache_salt):
            raise QueueFullError(f"the queue is full: max_queue_size {self._max_queue_size} requests are waiting")
        leader = self._state_of(request, room)
        self._tenants.add(leader)
        for index, sibling in enumerate(siblings, start=1):
            state = self._state_of(sibling, room)
            state.sequence_index, state.leader = index, leader
            leader.siblings.append(state)
            if request.branching.beam_width > 1:
                self._tenants.rest(state)
            else:
                self._tenants.add(state)
        return leader

    def _state_of(self, request: Request, room: int) -> RequestState:
        self._num_arrivals += 1
        rank = (request.arrival_time + request.priority * self._ageing_s, self._num_arrivals)
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self._eos_token_ids
        return RequestState(request, self._num_arrivals, rank, min(sampling.max_tokens, room), stop_ids)

    def _room(self, request: Request) -> int:
        """How many tokens may be generated."""
        prompt_len = len(request.prompt_token_ids)
        room = self._max_model_len - prompt_len
        if not prompt_len:
            raise InvalidRequestError("prompt: got no tokens; allowed: at least one token")
        if room < 1:
            allowed = f"at most {self._max_model_len - 1} tokens (max_model_len {self._max_model_len}, output included)"
            raise InvalidRequestError(f"prompt: got {prompt_len} tokens; allowed: {allowed}")
        return room

    def _is_full(self, num_more: int) -> bool:
        return self._tenants.num_queued + num_more > self._max_queue_size + self._seats.num_free

    def _may_displace(self, salt: str) -> bool:
        share = self._tenants.share(self._max_queue_size, newcomer=salt)
        largest = self._tenants.most_refusable()
        return largest is not None and self._tenants.num_refusable(salt) < share < len(largest.refusable)

    def displaced(self) -> RequestState | None:
        """See `Scheduler.displaced`."""
        largest = self._tenants.most_refusable()
        return largest.refusable.least() if largest and self._is_full(0) else None
