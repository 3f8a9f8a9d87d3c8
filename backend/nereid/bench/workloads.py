"""What engines are asked to do: lengths of prompts and outputs, and when each request comes. Frozen.

Always holds: the same name is the same work, on every machine: all lengths come from a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nereid.errors import ConfigError

_SEED = 20240501
_SHORT, _MID = (32, 96), (200, 400)
_NUM_OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. at: seconds after the start.  Lengths in tokens."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival. rate: requests a second of an open load; None: all come at once."""

    name: str
    arrivals: tuple[Arrival, ...]
    rate: float | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a request's prompt and output."""
        return max(a.num_prompt_tokens + a.num_output_tokens for a in self.arrivals)


def _at_once(name: str, count: int, lengths: tuple[int, int], num_output_tokens: int) -> Workload:
    rng = random.Random(f"{_SEED} {name}")
    return Workload(name, tuple(Arrival(0.0, rng.randint(*lengths), num_output_tokens) for _ in range(count)))


WORKLOADS: tuple[Workload, ...] = (
    _at_once("short-x1", 1, _SHORT, _NUM_OUTPUT_TOKENS),
    _at_once("short-x8", 8, _SHORT, _NUM_OUTPUT_TOKENS),
    _at_once("mid-x1", 1, _MID, _NUM_OUTPUT_TOKENS),
    _at_once("mid-x16", 16, _MID, _NUM_OUTPUT_TOKENS),
    _at_once("mid-x32", 32, _MID, _NUM_OUTPUT_TOKENS),
    _at_once("prefill-2000", 1, (2000, 2000), 1),
)

WARM_UP = _at_once("warm-up", 16, _MID, 16)
"""Run once by each engine after it was loaded, and not measured."""

STEPS: tuple[Workload, ...] = tuple(_at_once(f"steps-x{n}", n, (2, 2), _NUM_OUTPUT_TOKENS) for n in (1, 16, 32))
"""Prompts of hardly a token, so that every step is one of decoding alone."""

PROFILED = _at_once("profiled-x16", 16, _SHORT, 512)
"""Long enough to be looked at."""

REPLAY = "replay"


def streams(count: int) -> Workload:
    """So many requests at once, as the server is asked."""
    return _at_once(f"streams-x{count}", count, _SHORT, _NUM_OUTPUT_TOKENS)


def choose(names: Sequence[str], known: Sequence[Workload], others: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Those of `known` with these names; all where none is given.

    Raises ConfigError, which names what is not there. others: names of what it would allow besides.
    """
    by_name = {workload.name: workload for workload in known}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"--workloads: got {name}; allowed: {', '.join([*by_name, *others])}")
    return tuple(by_name[name] for name in names) if names else tuple(known)
