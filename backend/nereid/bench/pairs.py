"""Pairs of runs, of the engine alone and through a server: their figures, against what is aimed at. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nereid.bench import tables

_RATE_GOAL = 0.90
_LONE_GOAL = 0.95
_TTFT_GOAL_S = 0.015
_READY_GOAL_S = 6.0


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests, alone and through the server. Rates in output tokens a second; times in seconds.

    lone: share of the tokens that came through the server in a response of their own.  ttft: median over the streams.
    taken: share of the processor that others took from the engine alone.
    """

    round: int
    streams: int
    engine_rate: float
    server_rate: float
    engine_ttft: float
    server_ttft: float
    lone: float
    taken: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure against its goal, in words."""

    what: str
    found: str
    goal: str
    met: bool


def findings(pairs: Sequence[Pair], ready_s: float) -> list[Finding]:
    """By number of streams, medians over the pairs; the time to the first token at one stream alone."""
    found = []
    for streams in sorted({pair.streams for pair in pairs}):
        some = [pair for pair in pairs if pair.streams == streams]
        rate = statistics.median(pair.server_rate / pair.engine_rate for pair in some)
        lone = statistics.median(pair.lone for pair in some)
        found.append(_share(f"{streams} streams: tokens/s, of the engine alone", rate, _RATE_GOAL))
        found.append(_share(f"{streams} streams: tokens in responses of their own", lone, _LONE_GOAL))
        if streams == 1:
            later_s = statistics.median(pair.server_ttft - pair.engine_ttft for pair in some)
            what = "1 stream: first token later than the engine's"
            found.append(
                Finding(what, f"{later_s * 1e3:.1f} ms", f"{_TTFT_GOAL_S * 1e3:.0f} ms", later_s <= _TTFT_GOAL_S)
            )
    ready = Finding("READY after a warm start", f"{ready_s:.1f} s", f"{_READY_GOAL_S:.0f} s", ready_s <= _READY_GOAL_S)
    return [*found, ready]


def _share(what: str, found: float, goal: float) -> Finding:
    return Finding(what, f"{found:.1%}", f"{goal:.0%}", found >= goal)


def describe(pairs: Sequence[Pair], found: Sequence[Finding]) -> str:
    """A table of the pairs, and one of the goals."""
    rows = [
        [
            f"{pair.round} x{pair.streams}",
            f"{pair.engine_rate:.1f}",
            f"{pair.server_rate:.1f}",
            tables.share(pair.server_rate / pair.engine_rate),
            f"{pair.engine_ttft * 1e3:.0f}",
            f"{pair.server_ttft * 1e3:.0f}",
            tables.share(pair.lone),
            tables.share(pair.taken),
        ]
        for pair in pairs
    ]
    head = ("round", "engine/s", "server/s", "share", "engine TTFT ms", "server", "own responses", "others")
    goals = [[each.what, each.found, each.goal, "met" if each.met else "missed"] for each in found]
    return f"{tables.table(head, rows)}\n\n{tables.table(('', 'found', 'goal', ''), goals)}"
