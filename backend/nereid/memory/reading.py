"""MemoryReading: what a look at a device's memory shows. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """All in bytes.

    total: what there is, or what the process may have of it where that is less.  available: what can be had now, beside
    what anybody holds.  held: by this process.  peak: most that it held since the peak was last forgotten, where that
    can be told, and else at least that.
    """

    total: int
    available: int
    held: int
    peak: int
