"""How much of the processor others take, by the system's own counts; waiting until it is little.

Always holds: what is read covers the whole machine, processes that this one cannot see too, and what a hypervisor gives
to other machines.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.1
"""Share of all cores that others may take from a run that counts."""

_WINDOW_S = 0.5
_LONGEST_WAIT_S = 5.0
_IDLE = (3, 4)  # columns of /proc/stat's first line: idle, and waiting for a disk
_GUEST = 8  # this column and the next are counted in the first two as well


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """In ticks since some start: total: of all cores.  busy: of it, not idle.  own: of the process that is watched."""

    total: int
    busy: int
    own: int


def read_times(pid: int) -> ProcessorTimes:
    """Those of now; pid: of the process that is not "others". Raises OSError where it has ended."""
    counts = [int(count) for count in Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:]][:_GUEST]
    own = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[11:13]
    return ProcessorTimes(sum(counts), sum(counts) - sum(counts[i] for i in _IDLE), sum(map(int, own)))


def taken_by_others(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """Share of all cores' time between the two, from 0 to 1."""
    total = after.total - before.total
    others = after.busy - before.busy - (after.own - before.own)
    return min(1.0, max(0.0, others / total)) if total > 0 else 0.0


def wait_until_quiet() -> bool:
    """Return when others take little of the processor, or after 5 seconds in any case; whether it became quiet."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < deadline:
        before = read_times(os.getpid())
        time.sleep(_WINDOW_S)
        if taken_by_others(before, read_times(os.getpid())) < QUIET:
            return True
    return False
