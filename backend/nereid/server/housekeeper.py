"""Housekeeper: one thread that does small things at a fixed interval, until it is closed. Owns the thread alone.

A task that raises is logged and tried again at its next turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 0.2


def at_most_every(interval_s: float, task: Callable[[], None]) -> Callable[[], None]:
    """`task`, left out where its last turn was less than `interval_s` ago."""
    due = 0.0

    def run() -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + interval_s
            task()

    return run


class Housekeeper:
    """Runs `tasks` in order, about five times a second."""

    def __init__(self, tasks: Sequence[Callable[[], None]]) -> None:
        self._tasks = tuple(tasks)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="nereid-housekeeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; no task runs after this."""
        self._closed.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            for task in self._tasks:
                try:
                    task()
                except Exception:
                    _LOG.exception("a periodic task failed")
