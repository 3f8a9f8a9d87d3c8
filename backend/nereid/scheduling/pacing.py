"""Pacing: how many prompt tokens a step may take beside streams, so that their next tokens are not long in coming.

Owns what steps were measured to take: so many seconds without prompt tokens, and so many more for each of them. Both
follow the latest steps, since a prompt's tokens cost the more the longer what stands before them.
"""

from __future__ import annotations

_SHARE = 0.2  # of the latest step in what is expected of the next
_LEAST = 16  # tokens: a prompt gets on, whatever it costs
_FIRST = 64  # tokens, while nothing is known


class Pacing:
    """target_s: how long a step that streams wait for may take; None: as long as it does."""

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._base_s: float | None = None
        self._per_token_s: float | None = None

    @property
    def has_target(self) -> bool:
        return self._target_s is not None

    def most_prompt_tokens(self, budget: int) -> int:
        """Of a step that streams wait for. budget: what it has left at most."""
        if self._target_s is None:
            return budget
        if self._per_token_s is None:
            return min(budget, _FIRST)
        left = self._target_s - (self._base_s or 0.0)
        return min(budget, max(_LEAST, int(left / self._per_token_s)))

    def took(self, num_prompt_tokens: int, num_others: int, seconds: float) -> None:
        """A step is over. num_others: its tokens that are no prompt's."""
        if not num_prompt_tokens:
            self._base_s = _follow(self._base_s, seconds)
        else:
            base = (self._base_s or 0.0) if num_others else 0.0
            self._per_token_s = _follow(self._per_token_s, max(seconds - base, 0.0) / num_prompt_tokens)


def _follow(before: float | None, now: float) -> float:
    return now if before is None else before + _SHARE * (now - before)
