"""What a worker does: an engine loaded once, that answers one job of requests after the other.

Runs in the environment of whatever engine it is, so it stands on the standard library alone. A worker speaks lines of
JSON: settings come in first, and "ready" goes out; then jobs come in, and outcomes go out. Always holds: stdout has
nothing but these lines (what libraries print goes to stderr), and each line that came in is answered by one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

_LONGEST_WAIT_S = 1.0
_WARM_UP = [[0.0, [1] * 8, 8]]
"""Goes before each job: the engine may have been stopped, and the processor's cache is another engine's."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens that a request got at once. index: of the request in its job.  at: monotonic seconds."""

    index: int
    at: float
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Answer:
    """What one request got. sent: seconds after the job's start, as are the times `at` which `counts` tokens came."""

    sent: float
    at: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Served(Protocol):
    """An engine as a worker drives it. Greedy, with end-of-sequence ids ignored, and without a prefix cache."""

    def add(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Take a request; never waits."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Gain]:
        """What was gained since the last call: waits for some, or for `timeout_s` seconds where there is nothing to
        wait for. Raises where a request failed."""
        ...

    def parts(self) -> Mapping[str, float]:
        """Mean milliseconds of a step since the last call, by its part; empty where the engine does not say."""
        ...

    def versions(self) -> Mapping[str, str]:
        """What a figure of this engine depends on."""
        ...


class Steps:
    """A Served of an engine whose steps the caller makes."""

    def __init__(self, is_busy: Callable[[], bool], step: Callable[[], Iterable[tuple[int, Sequence[int]]]]) -> None:
        """step: makes one, and tells what each request gained."""
        self._is_busy = is_busy
        self._step = step

    def wait(self, timeout_s: float) -> Sequence[Gain]:
        if not self._is_busy():
            time.sleep(timeout_s)
            return ()
        gained = list(self._step())
        now = time.monotonic()
        return [Gain(index, now, tuple(token_ids)) for index, token_ids in gained if token_ids]

    def parts(self) -> Mapping[str, float]:
        return {}


def run_job(served: Served, requests: Sequence[Sequence[Any]], timeout_s: float) -> list[Answer]:
    """Send `requests`, each [at, prompt, max_tokens], `at` seconds from now, and wait until all have their tokens.

    Raises TimeoutError after `timeout_s`.
    """
    waiting = deque(sorted(enumerate(requests), key=lambda item: item[1][0]))
    answers = [Answer(request[0]) for request in requests]
    num_missing = sum(request[2] for request in requests)
    start = time.monotonic()
    while num_missing:
        now = time.monotonic() - start
        if now > timeout_s:
            raise TimeoutError(f"{num_missing} tokens are missing after {timeout_s:.0f} s")
        while waiting and waiting[0][1][0] <= now:
            index, (_, prompt, max_tokens) = waiting.popleft()
            served.add(index, prompt, max_tokens)
        pause = waiting[0][1][0] - now if waiting else _LONGEST_WAIT_S
        for gain in served.wait(max(0.0, min(pause, _LONGEST_WAIT_S))):
            answers[gain.index].at.append(gain.at - start)
            answers[gain.index].counts.append(len(gain.token_ids))
            answers[gain.index].token_ids.extend(gain.token_ids)
            num_missing -= len(gain.token_ids)
    return answers


def work(load: Callable[[Mapping[str, Any]], Served]) -> int:
    """The whole of a worker: until stdin ends. Returns the exit status."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        start = time.monotonic()
        served = load(json.loads(sys.stdin.readline()))
        reply({"load_s": time.monotonic() - start, "versions": dict(served.versions())})
        for line in sys.stdin:
            job = json.loads(line)
            run_job(served, _WARM_UP, job["timeout_s"])
            served.parts()
            answers = run_job(served, job["requests"], job["timeout_s"])
            reply({"answers": [asdict(answer) for answer in answers], "parts": dict(served.parts())})
    except Exception as error:  # whatever it is, the one who waits for a line must hear of it
        reply({"error": f"{type(error).__name__}: {error}"})
        raise
    return 0
