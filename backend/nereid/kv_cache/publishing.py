"""Publishing: how a sequence's computed blocks get into the prefix cache, and what it says of those to come.

Owns the announcements. Always holds: what is published is of tokens that are computed and certain; a sequence stands at
one node, its tail, which is pinned; what it publishes next is announced where its tokens were known when it came to
that node.
"""

from __future__ import annotations

from typing import Protocol

from nereid.kv_cache.announcements import Announcements
from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.cached_pool import CachedPool
from nereid.kv_cache.prefix_cache import Node, TokenIds
from nereid.kv_cache.sequence_blocks import SequenceBlocks

_NEVER = 1 << 62


class TokenSource(Protocol):
    """A sequence's known tokens."""

    @property
    def num_tokens(self) -> int: ...

    def token_ids(self, start: int, stop: int) -> TokenIds: ...


class Publishing:
    """What running sequences have published, and announced."""

    def __init__(self, pool: CachedPool, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self.announcements = Announcements()

    def settle(self, sequence: SequenceBlocks, source: TokenSource | None) -> None:
        """A sequence's tail is the last of its nodes. source: None where it is not to announce anything."""
        if sequence.root:
            self._move_tail(sequence, sequence.nodes[-1] if sequence.nodes else self._pool.tree.root(sequence.root))
        self._plan_next(sequence, source)

    def leave(self, sequence: SequenceBlocks) -> None:
        """A sequence has no tail any more."""
        self._announce(sequence, None)
        if sequence.tail:
            self._pool.tree.unpin(sequence.tail)
            sequence.tail = None

    def publish(self, sequence: SequenceBlocks, source: TokenSource, num_computed: int) -> None:
        """Let others find the full blocks of a sequence's first `num_computed` tokens."""
        tail, first, end = sequence.tail, len(sequence.nodes), num_computed // self._size
        if tail is None or first >= end:
            return
        for index in range(first, end):
            tail = self._pool.tree.child(tail, source.token_ids(index * self._size, (index + 1) * self._size))
            sequence.nodes.append(tail)
            for group in range(len(sequence.tables)):
                self._publish_block(sequence, tail, group, index)
        self._move_tail(sequence, tail)
        self._plan_next(sequence, source)

    def _publish_block(self, sequence: SequenceBlocks, node: Node, group: int, index: int) -> None:
        own, known = sequence.tables[group][index], node.blocks[group]
        if own in (NULL_BLOCK, known):  # it has left the window, or a fork has published it
            return
        if known == NULL_BLOCK:
            self._pool.attach(node, group, own)
        else:
            self._pool.share(known)
            sequence.replace(group, index, known)
            self._pool.release(own)

    def _plan_next(self, sequence: SequenceBlocks, source: TokenSource | None) -> None:
        sequence.publishes_at = (len(sequence.nodes) + 1) * self._size if sequence.root else _NEVER
        self._announce(sequence, source)

    def _announce(self, sequence: SequenceBlocks, source: TokenSource | None) -> None:
        start, after = len(sequence.nodes) * self._size, None
        if sequence.tail and source and start + self._size <= source.num_tokens:
            after = (sequence.tail, source.token_ids(start, start + self._size))
        self.announcements.change(sequence.announced, after)
        sequence.announced = after

    def _move_tail(self, sequence: SequenceBlocks, tail: Node) -> None:
        before, sequence.tail = sequence.tail, tail
        self._pool.tree.pin(tail)
        if before:
            self._pool.tree.unpin(before)
