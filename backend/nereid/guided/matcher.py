"""GuideMatcher: how far one request's output has come in its guide. Owns the library's matcher of that request.

Invariant: the state is a function of the guide and of the accepted tokens alone: a fork, or what is left after a
rollback, equals a new matcher that accepted the same. One thread at a time may use a matcher; forks are independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from nereid.errors import GuideError

Words = NDArray[np.int32]
_REASON_CHARS = 200


class GuideMatcher:
    """Accept what was drawn, ask what may come next."""

    def __init__(self, library: LLMatcher, num_words: int) -> None:
        """library: a matcher that is now this object's own.  num_words: int32 words that it writes for a mask."""
        self._library = library
        self._num_words = num_words

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens; False, and nothing has changed, where the guide does not allow all of them.

        Raises GuideError where the library gives up.
        """
        count = self._library.try_consume_tokens(list(token_ids))
        self._check()
        if count < len(token_ids):
            self.rollback(count)
            return False
        return True

    @property
    def is_complete(self) -> bool:
        """Nothing but the end can follow."""
        return self._library.is_stopped()

    @property
    def can_end(self) -> bool:
        """What was accepted is a whole output."""
        return self._library.is_accepting()

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted ones. Raises ValueError where there are not so many."""
        if num_tokens and not self._library.rollback(num_tokens):
            raise ValueError(f"num_tokens: got {num_tokens}; {reason_of(self._library.get_error())}")

    def fork(self) -> GuideMatcher:
        """Another matcher in the same state."""
        return GuideMatcher(self._library.deep_copy(), self._num_words)

    def fill(self, row: Words) -> None:
        """Write what may come next: bit t % 32 of word t // 32 is set where token t may.

        row: int32, contiguous, [words] for the model's vocabulary.  An end-of-sequence token may come where the output
        can end. Raises GuideError where no token may come, or the library gives up; the row then says nothing.
        """
        wide = row if len(row) == self._num_words else np.zeros(self._num_words, np.int32)
        fill_next_token_bitmask(self._library, wide[np.newaxis])
        self._check()
        if wide is not row:
            row[:] = wide[: len(row)]
        if not row.any():
            raise GuideError("no token of the model can follow")

    def _check(self) -> None:
        if self._library.is_error():
            raise GuideError(reason_of(self._library.get_error()))


def reason_of(message: str) -> str:
    """The library's reason in one line: it writes the offending source, then `error: ...`; or reason, then state."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join((said or lines or ["no reason given"])[0].split())[:_REASON_CHARS]
