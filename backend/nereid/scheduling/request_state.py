"""RequestState: a sequence of a request on its way through the scheduler. Changed by the scheduler's rooms alone.

Most requests have one sequence. Of several, the first is the leader, which computes the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import CacheRoot
from nereid.request import FinishReason, Request, RequestStatus

Rank = tuple[float, int]  # less is better


@dataclass(slots=True, eq=False)
class RequestState:
    """One sequence. States are told apart by identity.

    request: as this sequence sees it, under an id of its own; request_id, salt: its own.  arrival: ascending in the
    order in which the scheduler took requests; a request's sequences follow one another.  rank: (arrival time + what
    its priority is worth in seconds of waiting, arrival): never changes, and no two are equal.  stop_ids: tokens that
    end it.  known_to_executor: it has been scheduled, so that the executor holds its prompt and tokens.
    num_tokens: of the prompt and the output so far.  num_cached_tokens: found in the prefix cache when it first
    started.  num_new_blocks: allocated for it so far.  num_restores: steps in which blocks were read from disk for it.
    sequence_index: which of its request's it is.  leader: the first of them, None for that one itself.  siblings: a
    leader's others.  match: what the prefix cache held of it when that was last looked up, while it waits.
    first_given: position of the first token of which the executor has to be told; None: it knows all.
    """

    request: Request
    arrival: int
    rank: Rank
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    request_id: int = field(init=False)
    salt: str = field(init=False)
    num_tokens: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    known_to_executor: bool = False
    num_cached_tokens: int = 0
    num_new_blocks: int = 0
    num_preemptions: int = 0
    num_restores: int = 0
    sequence_index: int = 0
    leader: RequestState | None = None
    siblings: list[RequestState] = field(default_factory=list)
    match: Match | None = None
    first_given: int | None = None

    def __post_init__(self) -> None:
        request = self.request  # NOTE: what is asked for in every step is a field, for each of many requests
        self.request_id, self.salt = request.request_id, request.cache_salt
        self.num_tokens = len(request.prompt_token_ids)

    @property
    def running(self) -> bool:
        return self.status is RequestStatus.RUNNING

    @property
    def waits_for_leader(self) -> bool:
        """Whether another sequence is to compute the prompt, which this one needs too."""
        leader = self.leader
        return leader is not None and leader.status is not RequestStatus.FINISHED and not leader.output_token_ids

    @property
    def is_waited_for(self) -> bool:
        """Whether others draw their first tokens where this one does; beams go on from where it is."""
        draws = self.request.branching.beam_width == 1
        return draws and not self.output_token_ids and any(sibling.waits_for_leader for sibling in self.siblings)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Its known tokens from `start` on, up to `stop`."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        outputs = self.output_token_ids[max(0, start - len(prompt)) : stop - len(prompt)]
        return (*prompt[start:], *outputs)

    def append(self, token_id: int) -> FinishReason | None:
        """A token was drawn; returns why it is the last one, if it is."""
        output = self.output_token_ids
        output.append(token_id)
        self.num_tokens += 1
        if token_id in self.stop_ids and len(output) > self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= self.max_tokens else None

    def go_on_with(self, output_token_ids: Iterable[int]) -> None:
        """Have this output instead of what was drawn; what differs is to be told the executor."""
        before, output = self.output_token_ids, list(output_token_ids)
        prompt_len = len(self.request.prompt_token_ids)
        known = len(before) if self.first_given is None else self.first_given - prompt_len
        pairs = zip(before[:known], output, strict=False)
        same = next((index for index, (old, new) in enumerate(pairs) if old != new), min(known, len(output)))
        self.output_token_ids, self.first_given = output, prompt_len + same
        self.num_tokens = prompt_len + len(output)
        self.match = None

    def take_given(self) -> tuple[int, tuple[int, ...]]:
        """(position, tokens from there on) that the executor does not know; it does from now on."""
        first, self.first_given = self.first_given, None
        return (0, ()) if first is None else (first, self.token_ids(first, self.num_tokens))

    @property
    def root(self) -> CacheRoot | None:
        """Where in the prefix cache its tokens are; None where it takes no part.

        A prompt whose logprobs are told has to be computed, from its first token on.
        """
        telling = self.request.sampling.prompt_logprobs is not None and not self.output_token_ids
        return CacheRoot(self.salt) if self.request.cache and not telling else None
