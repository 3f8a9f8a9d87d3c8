"""BeamSearch: which hypotheses go on and which are finished, from the logprobs of their next tokens alone.

Plain arithmetic; knows neither blocks nor seats. The search is that of transformers' `generate(num_beams=width)`: each
step keeps the `width` most probable continuations that do not end; one that ends counts where it is among the `width`
most probable of all; the `width` best finished ones are kept, by total / length ** length_penalty. The search ends at
max_tokens, where `width` are finished and early_stopping says so, or where the best live hypothesis, were it finished
as long as it is, would not be among them.

Invariants: there are never more than `width` live hypotheses, the most probable first; none is finished before it is
longer than min_tokens by the token that stops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from nereid.request import Branching, FinishReason, TokenLogprobs

TopTokens = Sequence[tuple[int, float]]  # (token id, logprob), best first


def num_candidates(width: int, num_stop_ids: int) -> int:
    """How many best next tokens of each hypothesis the search has to see, so that it misses none that counts.

    `width` of them do not stop, and no more than `width` of one hypothesis go on.
    """
    return width + num_stop_ids


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A beginning of an answer. total: the sum of its logprobs.  reason: why it ended; None: it did not.

    last: its last token, told with `best`, the tokens that it was chosen from.
    """

    parent: Hypothesis | None = None
    last: int = -1
    best: TopTokens = ()
    total: float = 0.0
    length: int = 0
    reason: FinishReason | None = None

    def _upwards(self) -> Iterator[Hypothesis]:
        place: Hypothesis | None = self
        while place is not None and place.parent is not None:
            yield place
            place = place.parent

    @property
    def token_ids(self) -> list[int]:
        return [place.last for place in self._upwards()][::-1]

    def logprobs(self, count: int) -> list[TokenLogprobs]:
        """Of each token, told with the `count` best ones."""
        return [_told(place.last, place.best, count) for place in self._upwards()][::-1]


def _told(token: int, best: TopTokens, count: int) -> TokenLogprobs:
    logprob = next(value for known, value in best if known == token)
    rank = 1 + sum(value > logprob for _, value in best)
    return TokenLogprobs(token, logprob, rank, tuple(best[:count]))


@dataclass(frozen=True, slots=True)
class Move:
    """A hypothesis that goes on: out of which of the step's before, by which token."""

    parent: int
    token_id: int


class BeamSearch:
    """One request's search."""

    def __init__(self, branching: Branching, stop_ids: frozenset[int], min_tokens: int, max_tokens: int) -> None:
        """stop_ids: tokens that end a hypothesis, and are its last."""
        self._branching = branching
        self._width = branching.beam_width
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._length = 0
        self.live: list[Hypothesis] = [Hypothesis()]
        self._finished: list[Hypothesis] = []  # the best first

    def advance(self, found: Sequence[TopTokens]) -> list[Move]:
        """One step. found: of each live hypothesis its best next tokens, `num_candidates` of them where there are so
        many. Returns how the live ones of the next step came about, in their order; none where the search has ended.
        """
        self._length += 1
        candidates = sorted(self._candidates(found), key=lambda pair: -pair[1].total)  # stable: ties by the hypothesis
        self._finish(h for _, h in candidates[: self._width] if h.reason is not None)
        going = [(parent, h) for parent, h in candidates if h.reason is None][: self._width]
        if going and self._has_ended(going[0][1]):
            going = []
        if going:
            self.live = [h for _, h in going]
        return [Move(parent, h.last) for parent, h in going]

    def _candidates(self, found: Sequence[TopTokens]) -> Iterator[tuple[int, Hypothesis]]:
        for index, (parent, tokens) in enumerate(zip(self.live, found, strict=True)):
            for token, logprob in tokens:
                stops = token in self._stop_ids
                if logprob > -inf and not (stops and self._length <= self._min_tokens):
                    ended = FinishReason.LENGTH if self._length >= self._max_tokens else None
                    reason = FinishReason.STOP if stops else ended
                    yield index, Hypothesis(parent, token, tokens, parent.total + logprob, self._length, reason)

    def _finish(self, ended: Iterator[Hypothesis]) -> None:
        self._finished = sorted([*self._finished, *ended], key=lambda h: -self._score(h))[: self._width]

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.total / float(max(1, hypothesis.length) ** self._branching.length_penalty)

    def _has_ended(self, best: Hypothesis) -> bool:
        """best: of those that could go on."""
        if len(self._finished) < self._width:
            return False
        return self._branching.early_stopping or self._score(best) <= self._score(self._finished[-1])

    def best(self) -> list[Hypothesis]:
        """The n best hypotheses, finished ones before the others: these count only where the search is broken off."""
        live = sorted(self.live, key=lambda h: -self._score(h))
        return [*self._finished, *live][: self._branching.n]
