"""Handover: the guides that were made ready for requests which are still on their way to the loop. For any thread.

Invariant: what was given for a request is there when the request comes, whatever else has been compiled meanwhile,
unless that takes more than _KEPT_S seconds or _MAX_GUIDES others are waiting with it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nereid.request import Guide

if TYPE_CHECKING:
    from nereid.guided.library import CompiledGuide

_KEPT_S = 60.0  # a request that failed on its way never comes
_MAX_GUIDES = 1024


@dataclass(slots=True)
class _Given:
    compiled: CompiledGuide
    num_requests: int
    end: float


class Handover:
    """Give a guide once for each request; take it as often."""

    def __init__(self, kept_s: float = _KEPT_S, max_guides: int = _MAX_GUIDES) -> None:
        self._kept_s = kept_s
        self._max_guides = max_guides
        self._given: OrderedDict[Guide, _Given] = OrderedDict()  # by `end`
        self._lock = threading.Lock()

    def give(self, compiled: CompiledGuide) -> None:
        """Keep it for one request more."""
        now = time.monotonic()
        with self._lock:
            given = self._given.pop(compiled.guide, None)
            num_requests = given.num_requests + 1 if given else 1
            self._given[compiled.guide] = _Given(compiled, num_requests, now + self._kept_s)
            while self._given and (len(self._given) > self._max_guides or self._oldest_end() <= now):
                self._given.popitem(last=False)

    def take(self, guide: Guide) -> CompiledGuide | None:
        """For one request; None where it is not kept."""
        with self._lock:
            given = self._given.get(guide)
            if given is None:
                return None
            given.num_requests -= 1
            if not given.num_requests:
                del self._given[guide]
            return given.compiled

    def _oldest_end(self) -> float:
        return next(iter(self._given.values())).end
