"""HostTier: which blocks of the host's memory hold what. Ids only, every operation O(1) a block.

Owns the host's block pool. A host block is free, or it holds a cached block of the prefix cache (kept in the order of
eviction, unless somebody is about to copy it back), or a part of a preempted sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nereid.kv_cache.block_pool import NULL_BLOCK, BlockPool
from nereid.kv_cache.prefix_cache import Node


class HostTier:
    """Blocks 1 .. num_blocks - 1 of the host's memory."""

    def __init__(self, num_blocks: int) -> None:
        """num_blocks counts the null block; less than 2: there are none."""
        self._pool = BlockPool(max(2, num_blocks))
        self.exists = num_blocks > 1
        self._cached: OrderedDict[int, tuple[Node, int]] = OrderedDict()  # node and group by block

    @property
    def num_free(self) -> int:
        return self._pool.num_free if self.exists else 0

    @property
    def num_available(self) -> int:
        """Free blocks, and cached ones that may go."""
        return self.num_free + len(self._cached)

    def allocate(self) -> int:
        """A free block; there has to be one."""
        (block,) = self._pool.allocate(1) or (NULL_BLOCK,)
        assert block != NULL_BLOCK and self.exists, "no host block is free"
        return block

    def keep(self, node: Node, group: int, block: int) -> None:
        """An allocated block holds what a node's block on the device held."""
        node.host_blocks[group] = block
        self._cached[block] = (node, group)

    def claim(self, node: Node, group: int) -> None:
        """A node's block is about to be copied, and must not be evicted until it is forgotten or unclaimed."""
        del self._cached[node.host_blocks[group]]

    def unclaim(self, node: Node, group: int) -> None:
        self._cached[node.host_blocks[group]] = (node, group)

    def evict(self) -> tuple[Node, int, int]:
        """Take the block that is to go first from its node: node, group and block, which is free now."""
        block, (node, group) = self._cached.popitem(last=False)
        node.host_blocks[group] = NULL_BLOCK
        self.release(block)
        return node, group, block

    def forget(self, node: Node, group: int) -> None:
        """A node's block is not needed any more; nothing happens where it has none."""
        block = node.host_blocks[group]
        if block != NULL_BLOCK:
            self._cached.pop(block, None)
            node.host_blocks[group] = NULL_BLOCK
            self.release(block)

    def release(self, block: int) -> None:
        """An allocated block is free again."""
        self._pool.release((block,))

    @property
    def cached(self) -> list[tuple[Node, int, int]]:
        """(node, group, block) of all cached blocks."""
        return [(node, group, block) for block, (node, group) in self._cached.items()]

    def check_integrity(self, others: Iterable[int]) -> None:
        """Raise AssertionError unless every block is free, cached, or one of `others`."""
        if self.exists:
            self._pool.check_integrity([self._cached, others])
        for block, (node, group) in self._cached.items():
            assert node.host_blocks[group] == block, f"host block {block} is not its node's"
            assert not node.detached and node.blocks[group] == NULL_BLOCK, f"host block {block} is of no use"
