"""Announcements: which blocks running sequences are about to compute and publish, so that others wait for them instead
of computing the same. Owns those counts."""

from __future__ import annotations

from nereid.kv_cache.prefix_cache import Node, TokenIds

NextBlock = tuple[Node, TokenIds]  # the node behind which a block stands, and its tokens


class Announcements:
    """How many sequences are going to publish a block, by block."""

    def __init__(self) -> None:
        self._counts: dict[NextBlock, int] = {}

    def __contains__(self, block: NextBlock) -> bool:
        return block in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def change(self, before: NextBlock | None, after: NextBlock | None) -> None:
        """A sequence announces another block than before; None: none."""
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        if after is not None:
            self._counts[after] = self._counts.get(after, 0) + 1
