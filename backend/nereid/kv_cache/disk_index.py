"""DiskIndex: which blocks the disk is believed to hold. Owns their names; reads and writes nothing.

What it believes may be wrong (a write that failed, a file that another process removed): then a load fails, and is
forgotten. A name stands for everything that a block depends on, see block_keys.
"""

from __future__ import annotations

from collections.abc import Iterable

from nereid.batch import BlockKey
from nereid.kv_cache.block_keys import child_name, root_name
from nereid.kv_cache.prefix_cache import Node, TokenIds


class DiskIndex:
    """Names of the blocks on disk."""

    def __init__(self, fingerprint: str, names: Iterable[str]) -> None:
        """fingerprint: as in Capacity."""
        self._fingerprint = fingerprint
        self._names = set(names)

    def __contains__(self, key: BlockKey) -> bool:
        return key.name in self._names

    def add(self, key: BlockKey) -> None:
        self._names.add(key.name)

    def discard(self, names: Iterable[str]) -> None:
        self._names.difference_update(names)

    def key(self, node: Node, group: int) -> BlockKey:
        """What names a node's block."""
        assert node.parent is not None, "a root has no block"
        return self.key_behind(node.parent, node.token_ids, group)

    def key_behind(self, parent: Node, token_ids: TokenIds, group: int) -> BlockKey:
        """What names a block with these tokens behind a node's."""
        name = self._name(parent)
        return BlockKey(child_name(name, token_ids, group), name, token_ids, group)

    def _name(self, node: Node) -> str:
        """A node's name, that of its first group's block; remembered, with those of all nodes before it."""
        unnamed = []
        while node.name is None and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        if node.name is None:
            node.name = root_name(self._fingerprint, node.root.salt, node.root.adapter)
        name = node.name
        for node in reversed(unnamed):
            name = node.name = child_name(name, node.token_ids, 0)
        return name
