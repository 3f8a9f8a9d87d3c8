"""Outcomes: how requests ended, and how many responses were merged. Counts what passes the sender, where every request
ends exactly once, whether it reached the engine or not. Each sequence that was told counts, as vLLM counts them.

Fed by the sender's thread, emptied by any other (`take`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nereid.errors import ErrorCode
from nereid.request import FinishReason
from nereid.server.mailbox import Letter


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """What ended since the report before it.

    finished: sequences that ended by themselves, by reason.  failed: requests, by code.  num_merged: responses of
    streams that went into the one before them, since that had not been sent yet.
    """

    finished: Mapping[FinishReason, int]
    failed: Mapping[ErrorCode, int]
    num_merged: int


class Outcomes:
    """Counters of one model."""

    def __init__(self) -> None:
        self._finished: Counter[FinishReason] = Counter()
        self._failed: Counter[ErrorCode] = Counter()
        self._num_merged = 0
        self._lock = threading.Lock()

    def merged(self) -> None:
        """A response was merged with the one before it."""
        with self._lock:
            self._num_merged += 1

    def sent(self, letter: Letter) -> None:
        """A response is about to be sent; it may be a sequence's last, or the request's."""
        with self._lock:
            if letter.failure is not None:
                self._failed[letter.failure.code] += 1
            self._finished.update(output.finish_reason for output in letter.outputs if output.finish_reason is not None)

    def take(self) -> OutcomeReport:
        """What was counted since the last call; counts begin anew. Called by any thread."""
        with self._lock:
            report = OutcomeReport(self._finished, self._failed, self._num_merged)
            self._finished, self._failed, self._num_merged = Counter(), Counter(), 0
        return report
