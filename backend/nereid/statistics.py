"""EngineStatistics: what the engine has done since somebody last asked, as plain data for metrics.

Fed by the loop thread, emptied by any other (`take`); the one lock between them is held for microseconds. Always
holds: it stays small where nobody asks: values that come with each token or step are counted by bucket, and of
requests that ended no more than the latest 2048 are kept.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nereid.request import Branching, Request, RequestStats

# Upper bounds of buckets: vLLM's for its own metrics.
TOKEN_GAP_BOUNDS = (
    .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_TIME_BOUNDS = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1.0)  # fmt: skip
STEP_PARTS = ("schedule", "run", "update")

_MOST_FINISHED = 2048


@dataclass(frozen=True, slots=True)
class Tally:
    """Values counted by bucket. counts: one a bound, of the values up to it and above the bound before it; and one more
    for those above all bounds.  total: their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that the scheduler had taken in, at its end. end_time: monotonic seconds.  max_tokens, branching: as
    asked for."""

    stats: RequestStats
    end_time: float
    max_tokens: int
    branching: Branching = Branching()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What was done since the report before it.

    num_prompt_tokens, num_cached_tokens: of requests that got their first token; the latter were found in the cache.
    step_tokens: scheduled in each step.  step_times: seconds, by STEP_PARTS.  token_gaps: seconds between tokens.
    num_cache_queries, num_cache_hits: prompt tokens looked up in the prefix cache, and found there.
    accepted_by_position: how often a draft's first, second ... token was accepted.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    step_tokens: Tally
    step_times: Mapping[str, Tally]
    token_gaps: Tally
    num_cache_queries: int
    num_cache_hits: int
    num_drafts: int
    num_draft_tokens: int
    accepted_by_position: tuple[int, ...]
    finished: tuple[FinishedRequest, ...]


class _Bins:
    """A tally in the making."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def made(self) -> Tally:
        return Tally(self._bounds, tuple(self._counts), self._total)


@dataclass(slots=True)
class _Since:
    """Counts since the last report."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    step_tokens: _Bins = field(default_factory=lambda: _Bins(STEP_TOKENS_BOUNDS))
    step_times: tuple[_Bins, ...] = field(default_factory=lambda: tuple(_Bins(STEP_TIME_BOUNDS) for _ in STEP_PARTS))
    token_gaps: _Bins = field(default_factory=lambda: _Bins(TOKEN_GAP_BOUNDS))
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    finished: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=_MOST_FINISHED))


class EngineStatistics:
    """Counters of one engine. All methods are the loop thread's, but for `queue_age` and `take`."""

    def __init__(self) -> None:
        self._since = _Since()
        self._unscheduled: dict[int, float] = {}  # arrival time by request id, in the order of acceptance
        self._lock = threading.Lock()

    def accepted(self, request: Request) -> None:
        """The scheduler took a request in."""
        with self._lock:
            self._unscheduled[request.request_id] = request.arrival_time

    def scheduled(self, request_ids: Iterable[int]) -> None:
        """These take part in a step, perhaps for the first time."""
        with self._lock:
            for request_id in request_ids:
                self._unscheduled.pop(request_id, None)

    def advanced(self, before: RequestStats, num_tokens: int, now: float) -> None:
        """A step brought a request tokens. before: its stats before them."""
        with self._lock:
            since = self._since
            since.num_generated_tokens += num_tokens
            if before.last_token_time is None:
                since.num_prompt_tokens += before.num_prompt_tokens
                since.num_cached_tokens += before.num_cached_tokens
            else:
                since.token_gaps.add(now - before.last_token_time)

    def stepped(self, num_tokens: int, *times: float) -> None:
        """A step is done. num_tokens: scheduled in it.  times: monotonic seconds at its start, and at the end of each
        of STEP_PARTS."""
        with self._lock:
            self._since.step_tokens.add(num_tokens)
            for bins, start, end in zip(self._since.step_times, times[:-1], times[1:], strict=True):
                bins.add(end - start)

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        """The prefix cache was asked for a prompt of `num_tokens` tokens, and held the first `num_found`."""
        with self._lock:
            self._since.num_cache_queries += num_tokens
            self._since.num_cache_hits += num_found

    def drafted(self, num_tokens: int, num_accepted: int) -> None:
        """A draft of `num_tokens` tokens was verified; its first `num_accepted` were accepted."""
        with self._lock:
            since = self._since
            since.num_drafts += 1
            since.num_draft_tokens += num_tokens
            counts = since.accepted_by_position
            counts.extend([0] * (num_accepted - len(counts)))
            for position in range(num_accepted):
                counts[position] += 1

    def finished(self, request: Request, stats: RequestStats) -> None:
        """A request that was accepted has ended, in whatever way."""
        done = FinishedRequest(stats, time.monotonic(), request.sampling.max_tokens, request.branching)
        with self._lock:
            self._unscheduled.pop(request.request_id, None)
            self._since.finished.append(done)

    @property
    def queue_age(self) -> float:
        """Seconds since the arrival of the request that waits longest for its first step; 0 where none waits. For any
        thread."""
        with self._lock:
            oldest = next(iter(self._unscheduled.values()), None)
        return 0.0 if oldest is None else max(0.0, time.monotonic() - oldest)

    def take(self) -> EngineReport:
        """What was counted since the last call; counts begin anew. Called by any thread."""
        with self._lock:
            since, self._since = self._since, _Since()
        return EngineReport(
            num_prompt_tokens=since.num_prompt_tokens,
            num_cached_tokens=since.num_cached_tokens,
            num_generated_tokens=since.num_generated_tokens,
            step_tokens=since.step_tokens.made(),
            step_times={part: bins.made() for part, bins in zip(STEP_PARTS, since.step_times, strict=True)},
            token_gaps=since.token_gaps.made(),
            num_cache_queries=since.num_cache_queries,
            num_cache_hits=since.num_cache_hits,
            num_drafts=since.num_drafts,
            num_draft_tokens=since.num_draft_tokens,
            accepted_by_position=tuple(since.accepted_by_position),
            finished=tuple(since.finished),
        )
