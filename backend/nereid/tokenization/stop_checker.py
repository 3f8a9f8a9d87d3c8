"""StopChecker: finds stop strings in a growing text, and holds back what may become one. One object a request.

Invariants: no part of a stop string that ends the text is ever given out, unless it was asked for; text that turned out
not to be one is given out whole; of several stop strings the one that begins earliest wins.
"""

from __future__ import annotations


class StopChecker:
    """Stop strings over text that arrives in pieces of any size."""

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        """include_stop: the stop string that was found is shown, as the end of the text."""
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """Take in new text. Returns the text that can be shown, and the stop string that was found."""
        text = self._held + text
        found = [(start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            start, stop = min(found, key=lambda place: place[0])
            return text[: start + len(stop) if self._include_stop else start], stop
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, `stop` itself excluded."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
