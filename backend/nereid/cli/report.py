"""Report: what a long command is doing, for a person at a terminal and for a log alike. Owns the output to stdout.

Always holds: on a terminal a step's details replace each other in one line; elsewhere they are lines of their own, at
most one every few seconds.
"""

from __future__ import annotations

import shutil
import sys
import time

_LINE_EVERY_S = 5.0
_REDRAW_EVERY_S = 0.2
_CLEAR = "\r\x1b[K"


class Report:
    """Numbered steps, each with its elapsed time."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._number = 0
        self._title = ""
        self._started = self._last_line = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def step(self, title: str) -> None:
        """The step before, if one is open, must be `done`."""
        self._number += 1
        self._title = title
        self._started = self._last_line = time.monotonic()
        self._show("")

    def detail(self, text: str) -> None:
        """How far the step is."""
        if time.monotonic() - self._last_line < (_REDRAW_EVERY_S if self._terminal else _LINE_EVERY_S):
            return
        self._last_line = time.monotonic()
        if self._terminal:
            self._show(f": {text}")
        else:
            print(f"{self._head()}: {text} ({self._elapsed()})", flush=True)

    def done(self, result: str = "done") -> None:
        """Close the step."""
        print(f"{_CLEAR if self._terminal else ''}{self._head()}: {result} ({self._elapsed()})", flush=True)

    def say(self, text: str) -> None:
        """A line of its own, outside the steps."""
        print(text, flush=True)

    def _show(self, text: str) -> None:
        if self._terminal:
            line = f"{self._head()}{text} ({self._elapsed()})"
            print(f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def _head(self) -> str:
        return f"[{self._number}/{self._steps}] {self._title}"

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:.1f} s"
