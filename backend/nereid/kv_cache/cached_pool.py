"""CachedPool: the block pool and the prefix cache over it. Free blocks and cached ones that nobody uses are one supply.

Owns both, the tiers behind them, and the operations by which the memory is to follow; and keeps them in step: a block
in the tree has the tree as one owner; where it has no other, it can be evicted, and is when blocks run out, the least
recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from nereid.batch import CopyBlock, KVOp, SwapIn
from nereid.kv_cache.block_pool import NULL_BLOCK, BlockPool
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.host_tier import HostTier
from nereid.kv_cache.lower_tiers import LowerTiers
from nereid.kv_cache.prefix_cache import Node, PrefixCache


class CachedPool:
    """Blocks with owners. The null block, where it is named, is passed over."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        num_host_blocks: int = 0,
        disk: DiskIndex | None = None,
        *,
        reload_pays: bool = True,
    ) -> None:
        """num_blocks, num_host_blocks count the null block.  reload_pays: see LowerTiers."""
        self._pool = BlockPool(num_blocks)
        self.tree = PrefixCache(num_groups)
        self.tiers = LowerTiers(self.tree, HostTier(num_host_blocks), disk, reload_pays=reload_pays)
        self._ops: list[KVOp] = []
        self.num_allocated = 0  # blocks, since the start

    @property
    def num_blocks(self) -> int:
        """All blocks that can be handed out."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and cached ones that nobody uses."""
        return self._pool.num_free + self.tree.num_evictable

    def num_users(self, block: int) -> int:
        """Owners beside the tree."""
        return self._pool.num_owners(block) - (block in self.tree)

    def is_shared(self, block: int) -> bool:
        """Whether it has more than one owner, and must not be written into."""
        return self._pool.num_owners(block) > 1

    def allocate(self, count: int) -> list[int] | None:
        """Blocks with one owner each; None (and nothing changed) where there are fewer."""
        blocks = self._pool.allocate(count)
        if blocks is None:
            if count > self.num_free:
                return None
            while self._pool.num_free < count:
                self._evict()
            blocks = self._pool.allocate(count)
            assert blocks is not None
        self.num_allocated += count
        return list(blocks)

    def _evict(self) -> None:
        node, group, block = self.tree.evict()
        self.tree.pin(node)  # NOTE: the room on the host may be that of its last child
        self._ops += self.tiers.offload(node, group, block)
        self._pool.release((block,))
        self.tree.unpin(node)

    def share(self, *blocks: int) -> None:
        """Add an owner to each."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._pool.share(block)
                self.tree.now_used(block)

    def release(self, *blocks: int) -> None:
        """Take an owner from each."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._pool.release((block,))
                if self._pool.num_owners(block) == 1 and block in self.tree:
                    self.tree.now_unused(block)

    @contextmanager
    def held(self, places: Sequence[tuple[Node, int]]) -> Iterator[None]:
        """What nodes have of groups, on the device or in the host's memory, is not evicted meanwhile. Of the device's
        blocks, the first are evicted first afterwards."""
        blocks = [node.blocks[group] for node, group in places]
        on_host = [(node, group) for node, group in places if not node.blocks[group] and node.host_blocks[group]]
        self.share(*blocks)
        for node, group in on_host:
            self.tiers.host.claim(node, group)
        yield
        self.release(*blocks)
        for node, group in on_host:
            self.tiers.host.unclaim(node, group)

    def attach(self, node: Node, group: int, block: int) -> None:
        """Let the tree be an owner of a block, as a node's."""
        self.tiers.host.forget(node, group)
        self.tree.attach(node, group, block)
        self._pool.share(block)

    def bring_back(self, node: Node, group: int, block: int) -> None:
        """Copy what a node has in the host's memory to a block of the device, which is the node's from now on. Its
        host block has been claimed."""
        self._ops.append(SwapIn(node.host_blocks[group], block))
        self.attach(node, group, block)

    def copy(self, node: Node, group: int, target: int) -> None:
        """Copy a node's block, on the device or in the host's memory, to a block of one owner."""
        source = node.blocks[group]
        self._ops.append(CopyBlock(source, target) if source else SwapIn(node.host_blocks[group], target))

    def detach(self, node: Node) -> None:
        """Let nobody find a node, nor what is below it, any more."""
        nodes, blocks = self.tree.detach(node)
        self._pool.release(blocks)
        for below in nodes:
            for group in range(len(below.host_blocks)):
                self.tiers.host.forget(below, group)

    def do(self, *ops: KVOp) -> None:
        """Have operations carried out, after those before."""
        self._ops += ops

    def take_ops(self) -> tuple[KVOp, ...]:
        """All operations since the last call, in order."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def check_integrity(self, tables: Iterable[Iterable[int]], host_blocks: Iterable[int]) -> None:
        """Raise AssertionError unless every block is free, or has just the owners that hold it. host_blocks: those of
        the host that are not cached."""
        self._pool.check_integrity([*tables, self.tree.blocks])
        self.tree.check_integrity()
        unused = {block for block in self.tree.blocks if not self.num_users(block)}
        assert unused == self.tree.evictable, "cached blocks that nobody uses, and those that can be evicted"
        self.tiers.host.check_integrity(host_blocks)
