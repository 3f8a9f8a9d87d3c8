"""KeyedHeap: items with keys, of which the least is found at once.

Invariants: each item is in it at most once; `least` is an item with the least key, the earliest put among equals.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=Any)

_SLACK = 8


class KeyedHeap(Generic[Item, Key]):
    """`put` (also with another key), `discard` and `least` cost O(log n), amortised; memory is O(n).

    Entries that are out of date stay in the heap until they come to its top or outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Item]] = []
        self._live: dict[Item, tuple[Key, int, Item]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[Item]:
        """All items, in no order."""
        return iter(self._live)

    def put(self, item: Item, key: Key) -> None:
        """Take `item` in, or give it another key."""
        old = self._live.get(item)
        if old is not None and old[0] == key:
            return
        self._serial += 1
        entry = self._live[item] = (key, self._serial, item)
        heapq.heappush(self._heap, entry)
        self._trim()

    def discard(self, item: Item) -> None:
        """Take `item` out; nothing happens where it is not in."""
        if self._live.pop(item, None) is not None:
            self._trim()

    def key_of(self, item: Item) -> Key:
        """The key of an item that is in. Raises KeyError."""
        return self._live[item][0]

    def least(self) -> Item | None:
        """An item with the least key; None where there is none."""
        heap = self._heap
        while heap and self._live.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
