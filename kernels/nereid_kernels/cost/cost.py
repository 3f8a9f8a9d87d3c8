"""The cost of a launch, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """loaded, stored: bytes that the programs ask for; what two of them read counts twice, and caches may serve it.
    distinct: bytes that have to cross the memory bus at least: each byte read once, each written once.
    flops: of matrix products, 2 a multiply-add, with the padding of their tiles."""

    loaded: int = 0
    stored: int = 0
    distinct: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.loaded + other.loaded,
            self.stored + other.stored,
            self.distinct + other.distinct,
            self.flops + other.flops,
        )

    def times(self, factor: int) -> Cost:
        return Cost(self.loaded * factor, self.stored * factor, self.distinct * factor, self.flops * factor)


Formula = Callable[[Mapping[str, Any], tuple[int, ...]], Cost]
"""From a launch's arguments and grid."""
