"""LimitedLog: warnings that may come a thousand at a time, of which a few are shown.

Always holds: at most `burst` are shown in `period_s` seconds, and the next one shown tells how many were not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class LimitedLog:
    """Warnings to one logger, from any thread."""

    def __init__(
        self,
        log: logging.Logger,
        burst: int = 5,
        period_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._burst = burst
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._until = clock()
        self._shown = 0
        self._hidden = 0

    def warning(self, message: str, *arguments: object) -> None:
        """As logging.Logger.warning."""
        with self._lock:
            if self._clock() >= self._until:
                self._until, self._shown = self._clock() + self._period_s, 0
            if self._shown >= self._burst:
                self._hidden += 1
                return
            self._shown += 1
            hidden, self._hidden = self._hidden, 0
        if hidden:
            message, arguments = message + " (%d more such warnings were not shown)", (*arguments, hidden)
        self._log.warning(message, *arguments)
