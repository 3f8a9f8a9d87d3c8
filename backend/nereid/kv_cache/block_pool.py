"""BlockPool: which blocks are free and how many owners each block has. Ids only, every operation O(1) a block.

Invariants: block 0 is the null block, never handed out; free blocks have no owner, all others at least one;
free + in use == all blocks but the null block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks counts the null block; at least 2."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more; got {num_blocks}")
        # Last in, first out: blocks in use stay few and warm, and memory that was never needed is never touched.
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owners = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """All blocks that can be handed out."""
        return len(self._owners) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def num_owners(self, block: int) -> int:
        return self._owners[block]

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks with one owner each, or None (and nothing changed) where there are fewer."""
        if count > len(self._free):
            return None
        first = len(self._free) - count
        blocks = tuple(reversed(self._free[first:]))
        del self._free[first:]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add an owner to a block in use."""
        if self._owners[block] < 1:
            raise ValueError(f"block {block} is not in use")
        self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block; a block without owners is free."""
        for block in blocks:
            if self._owners[block] < 1:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the counts equal what the owners hold and every block is somewhere. owned: by
        owner; the null block is nobody's."""
        owners = Counter(block for blocks in owned for block in blocks if block != NULL_BLOCK)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free to be handed out"
        for block in range(1, len(self._owners)):
            counted = self._owners[block]
            assert counted == owners[block], f"block {block}: {counted} owners counted, {owners[block]} exist"
            assert (counted == 0) == (block in free), f"block {block}: {counted} owners, free: {block in free}"
