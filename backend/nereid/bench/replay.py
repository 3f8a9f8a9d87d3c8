"""Azure's trace of conversations as open loads: requests come at rates that rise. Pure, but for reading.

Always holds: lengths and the pattern of arrivals are the trace's own, lengths divided by one number, gaps by another;
each load has a bounded count of requests in a bounded time.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nereid.bench.workloads import Arrival, Workload
from nereid.errors import ConfigError

RATES = (1.0, 2.0, 4.0, 8.0)
_LENGTHS_BY = 8
_SECONDS = 20.0
_LONGEST_PROMPT = 2000


@dataclass(frozen=True, slots=True)
class TracedLengths:
    """at: seconds since the trace began."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int


def azure(path: Path) -> list[TracedLengths]:
    """Azure's trace of conversations (Patel et al. 2024, "Splitwise", arXiv 2311.18677): lengths alone."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        TracedLengths((at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at, row in zip(times, rows, strict=True)
    ]


def read_trace(path: Path) -> list[TracedLengths]:
    """The trace that --trace names. Raises ConfigError where it is not there, is no such trace, or is too short."""
    try:
        trace = azure(path)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"--trace {path}: cannot be read as Azure's trace of conversations: {error}") from error
    needed = round(max(RATES) * _SECONDS)
    if len(trace) < needed:
        raise ConfigError(f"--trace {path}: has {len(trace)} requests; at least {needed} are needed")
    return trace


def replay(trace: Sequence[TracedLengths], rate: float) -> Workload:
    """The first requests of `trace`, as many as come in 20 s at `rate` requests a second on average."""
    part = trace[: round(rate * _SECONDS)]
    stretch = _SECONDS / max(part[-1].at - part[0].at, 1e-9)
    arrivals = (
        Arrival(
            (traced.at - part[0].at) * stretch,
            min(_scaled(traced.num_prompt_tokens), _LONGEST_PROMPT),
            _scaled(traced.num_output_tokens),
        )
        for traced in part
    )
    return Workload(f"replay-{rate:g}/s", tuple(arrivals), rate)


def _scaled(num_tokens: int) -> int:
    return max(1, round(num_tokens / _LENGTHS_BY))
