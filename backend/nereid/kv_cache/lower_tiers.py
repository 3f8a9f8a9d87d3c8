"""LowerTiers: where cached blocks go when the device needs their room: to the host's memory, and from there to disk.

Owns both tiers' books. Every decision comes as operations on the memory, to be carried out in the order in which they
were made; a host block may be handed out again at once, since what it held has been written or copied by an earlier
operation.
"""

from __future__ import annotations

from dataclasses import replace

from nereid.batch import KVOp, StoreBlock, SwapOut
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.host_tier import HostTier
from nereid.kv_cache.prefix_cache import Node, PrefixCache


class LowerTiers:
    """What lies behind the device's blocks of one prefix cache."""

    def __init__(self, tree: PrefixCache, host: HostTier, disk: DiskIndex | None, *, reload_pays: bool) -> None:
        """reload_pays: a block is copied back in less time than its tokens are computed in."""
        self._tree = tree
        self.host = host
        self.disk = disk
        self._keeps = reload_pays

    def offload(self, node: Node, group: int, block: int) -> list[KVOp]:
        """A block of the device is taken from its node: keep its contents, where that is worth it."""
        if not self._keeps or node.detached or node.host_blocks[group]:
            return []
        if self.host.exists:
            ops = self.make_room(1)
            if ops is None:
                return []
            host_block = self.host.allocate()
            self.host.keep(node, group, host_block)
            return [*ops, SwapOut(block, host_block)]
        return [*self._store(node, group, block, on_host=False)]

    def make_room(self, count: int) -> list[KVOp] | None:
        """Have `count` host blocks free, at the cost of cached ones; None where that cannot be."""
        if count > self.host.num_available:
            return None
        ops: list[KVOp] = []
        while self.host.num_free < count:
            node, group, host_block = self.host.evict()
            ops += self._store(node, group, host_block, on_host=True)
            self._tree.prune(node)
        return ops

    def _store(self, node: Node, group: int, block: int, *, on_host: bool) -> list[StoreBlock]:
        if self.disk is None or (key := self.disk.key(node, group)) in self.disk:
            return []
        self.disk.add(key)
        return [StoreBlock(key, block, on_host)]

    def store_all(self) -> list[KVOp]:
        """Write all cached blocks to disk that it does not hold, so that they outlive the process. Blocks behind others
        come before these, so that they are removed first where there are too many."""
        cached = [(*place, False) for place in self._tree.cached] + [(*place, True) for place in self.host.cached]
        ops = [op for node, group, block, on_host in cached for op in self._store(node, group, block, on_host=on_host)]
        return [replace(op, patient=True) for op in ops]
