"""Restoring: blocks on their way from disk into the prefix cache.

Owns them, from the plan that reads them to that plan's result: until then nobody finds them, and whoever wants the same
tokens waits. What could not be read is forgotten, so that a sequence waits finitely often. What was read behind it is
kept all the same: it is found again once the block before it is computed, and until then goes as others go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nereid.batch import BlockKey, LoadBlock
from nereid.kv_cache.announcements import Announcements
from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.cached_pool import CachedPool
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.matching import Match, found_blocks
from nereid.kv_cache.prefix_cache import CacheRoot, Node, TokenIds

_BYTES_PER_STEP = 32 << 20  # others wait for the step


@dataclass(frozen=True, slots=True)
class _Loading:
    node: Node
    group: int
    block: int
    key: BlockKey


class Restoring:
    """Blocks that the next plan, or the one that runs, reads."""

    def __init__(
        self, pool: CachedPool, layout: BlockLayout, announcements: Announcements, bytes_per_block: int
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._groups = range(len(layout.groups))
        self._announcements = announcements
        self._most = max(len(layout.groups), _BYTES_PER_STEP // max(1, bytes_per_block))
        self._loading: list[_Loading] = []
        self._announced: list[tuple[Node, TokenIds]] = []

    @property
    def blocks(self) -> list[int]:
        """Blocks of the device that are being read into."""
        return [loading.block for loading in self._loading]

    def start(self, root: CacheRoot, match: Match, token_ids: TokenIds) -> bool:
        """Have read what the disk holds of a sequence behind `match`; returns whether that is anything.

        token_ids: of the sequence; at least the last one is left to compute.
        """
        if self._pool.tiers.disk is None:
            return False
        first, index = match.nodes[-1] if match.nodes else self._pool.tree.root(root), len(match.nodes)
        if not self._keys(first, index, token_ids):
            self._pool.tree.prune(first)  # a root that was made for nothing
            return False
        with self._held(first, match):
            return self._read_behind(first, index, token_ids)

    @contextmanager
    def _held(self, last: Node, match: Match) -> Iterator[None]:
        """What was found is not evicted for what is behind it. last: the node of its last block, or the root."""
        found = sorted(found_blocks(match, self._layout, match.num_tokens), key=lambda place: -place[2])
        self._pool.tree.pin(last)
        with self._pool.held([(node, group) for node, group, _ in found]):  # the last first: leaves are evicted first
            yield
        self._pool.tree.unpin(last)

    def _read_behind(self, node: Node, index: int, token_ids: TokenIds) -> bool:
        """Have read the blocks from `index` on, as far as there is room. Returns whether that is any."""
        first, size = node, self._layout.block_size
        while len(self._loading) + len(self._groups) <= self._most:
            keys = self._keys(node, index, token_ids)
            fresh = self._pool.allocate(len(keys)) if keys else None
            if fresh is None:
                break
            node = self._read(node, token_ids[index * size : (index + 1) * size], keys, fresh)
            index += 1
        return node is not first

    def _keys(self, node: Node, index: int, token_ids: TokenIds) -> list[BlockKey]:
        """What names the block behind a node; none where it is not on disk, or has a place in the tree."""
        disk, size = self._pool.tiers.disk, self._layout.block_size
        tokens = token_ids[index * size : (index + 1) * size]
        if disk is None or (index + 1) * size >= len(token_ids) or tokens in node.children:
            return []
        keys = [disk.key_behind(node, tokens, group) for group in self._groups]
        return keys if all(map(disk.__contains__, keys)) else []

    def _read(self, parent: Node, tokens: TokenIds, keys: list[BlockKey], blocks: list[int]) -> Node:
        node = self._pool.tree.child(parent, tokens)
        for group, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            self._pool.tree.pin(node)
            self._pool.do(LoadBlock(key, block))
            self._loading.append(_Loading(node, group, block, key))
        self._announced.append((parent, tokens))
        self._announcements.change(None, (parent, tokens))
        return node

    def conclude(self, failed: Collection[str]) -> None:
        """The plan that reads them has been carried out; failed: names of what could not be read."""
        if disk := self._pool.tiers.disk:
            disk.discard(failed)
        for loading in self._end():
            node, group = loading.node, loading.group
            if loading.key.name not in failed and node.blocks[group] == NULL_BLOCK and not node.detached:
                self._pool.attach(node, group, loading.block)
            self._pool.release(loading.block)
            self._pool.tree.unpin(node)

    def abandon(self) -> bool:
        """Give the blocks up, since a running sequence needs them. Returns whether there were any.

        They are read even so; whatever is written into them comes later.
        """
        loadings = self._end()
        for loading in loadings:
            self._pool.release(loading.block)
            self._pool.tree.unpin(loading.node)
        return bool(loadings)

    def _end(self) -> list[_Loading]:
        """Nobody waits for them any more. The last come first, so that leaves are evicted first."""
        while self._announced:
            self._announcements.change(self._announced.pop(), None)
        loadings, self._loading = self._loading[::-1], []
        return loadings
