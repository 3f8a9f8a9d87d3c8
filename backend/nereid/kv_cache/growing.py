"""Growing: the slots that running sequences may write, and how many blocks these may still take.

Owns nothing; changes the pool that it is given, and the tables of the sequences. Always holds: slots that were given to
a sequence are its own, for nobody shares them; what lies behind a window is given up before a block is asked for;
`grow` takes no more blocks than `num_missing` said, in whatever chunks.
"""

from __future__ import annotations

from nereid.batch import CopyBlock
from nereid.kv_cache.cached_pool import CachedPool
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.restoring import Restoring
from nereid.kv_cache.sequence_blocks import SequenceBlocks


class Growing:
    """Tables of sequences over one pool."""

    def __init__(self, pool: CachedPool, layout: BlockLayout, restoring: Restoring) -> None:
        """restoring: what it reads is given up where a sequence finds no block."""
        self._pool = pool
        self._layout = layout
        self._groups = range(len(layout.groups))
        self._windowed = [group for group in self._groups if layout.groups[group].window]
        self._restoring = restoring

    def grow(self, sequence: SequenceBlocks, num_computed: int, num_tokens: int) -> int | None:
        """Give a sequence slots that it may write for the tokens from `num_computed` up to `num_tokens`.

        Returns how many blocks that took; None (and no block more) where there are too few.
        """
        if num_tokens <= sequence.num_writable:
            return 0
        self._leave_behind(sequence, num_computed)
        shared = self._shared(sequence, num_computed)
        missing = [self._num_lacking(table, num_tokens) for table in sequence.tables]
        count = sum(missing) + len(shared)
        if not count:
            return 0
        if (fresh := self._allocate(count)) is None:
            return None
        for group, index in shared:
            written_before = index * self._layout.block_size < num_computed
            self._replace(sequence, group, index, fresh.pop(), copy=written_before)
        for group, more in enumerate(missing):
            if more:
                sequence.extend(group, [fresh.pop() for _ in range(more)])
        sequence.num_writable = self._num_writable(sequence)
        return count

    def num_missing(self, sequence: SequenceBlocks, num_computed: int, num_tokens: int) -> int:
        """How many blocks a sequence may still need until its first `num_tokens` tokens are computed, and for copies of
        those that it will write into and others use."""
        if num_tokens <= sequence.num_writable:
            return 0
        more = (self._num_more(sequence, group, num_computed, num_tokens) for group in self._groups)
        return sum(more) + len(self._shared(sequence, num_computed))

    def cut(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Give up the slots behind a sequence's first `num_tokens` tokens."""
        end = self._layout.num_blocks(num_tokens)
        for group, table in enumerate(sequence.tables):
            self._pool.release(*reversed(table[end:]))
            sequence.cut(group, end)

    def _leave_behind(self, sequence: SequenceBlocks, num_computed: int) -> None:
        for group in self._windowed:
            end = min(self._layout.first_seen(group, num_computed), len(sequence.tables[group]))
            self._pool.release(*sequence.leave(group, end, self._layout.num_sink_blocks(group)))

    def _shared(self, sequence: SequenceBlocks, num_computed: int) -> list[tuple[int, int]]:
        """(group, index) of blocks in which it has tokens to write, and which others use."""
        first = num_computed // self._layout.block_size
        return [
            (group, index)
            for group, table in enumerate(sequence.tables)
            for index in range(first, len(table))
            if self._pool.is_shared(table[index])
        ]

    def _num_lacking(self, table: list[int], num_tokens: int) -> int:
        return max(0, self._layout.num_blocks(num_tokens) - len(table))

    def _num_more(self, sequence: SequenceBlocks, group: int, num_computed: int, num_tokens: int) -> int:
        """How many blocks a table may still take. What leaves the window makes room for them, if no other uses it."""
        table, num_left = sequence.tables[group], sequence.num_left[group]
        more = self._num_lacking(table, num_tokens)
        if not more or not self._layout.groups[group].window:
            return more
        num_sinks = self._layout.num_sink_blocks(group)
        counted = min(num_sinks, num_left)
        for index in range(num_left, len(table)):
            counted += index < num_sinks or self._pool.num_users(table[index]) == 1
        return min(more, max(0, self._layout.most_blocks(group, num_tokens, num_computed) - counted))

    def _allocate(self, count: int) -> list[int] | None:
        fresh = self._pool.allocate(count)
        return self._pool.allocate(count) if fresh is None and self._restoring.abandon() else fresh

    def _replace(self, sequence: SequenceBlocks, group: int, index: int, block: int, *, copy: bool) -> None:
        before = sequence.tables[group][index]
        if copy:
            self._pool.do(CopyBlock(before, block))
        sequence.replace(group, index, block)
        self._pool.release(before)

    def _num_writable(self, sequence: SequenceBlocks) -> int:
        leaving = [self._layout.leaves_at(group, sequence.num_left[group]) for group in self._windowed]
        return min([len(sequence.tables[0]) * self._layout.block_size, *leaving])
