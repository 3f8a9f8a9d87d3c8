"""SequenceBlocks: the block tables of one running sequence, and where it stands in the prefix cache.

Plain data, changed by the KV cache manager and its rooms alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nereid.batch import BlockIds
from nereid.kv_cache.announcements import NextBlock
from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.prefix_cache import CacheRoot, Node


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """tables: by KV cache group; NULL_BLOCK where a block has left the window.  num_left: by group, how many blocks
    from the table's start on lie behind the window, sink blocks among them.  num_sent: by group, how many leading
    entries the executor knows as they are.

    has_news: the executor may not know all of the tables.  num_writable: up to so many tokens, those that are still to
    be computed have slots that nobody shares, and no block leaves a window meanwhile; 0: that is to be looked at.
    publishes_at: so many tokens have to be computed before it publishes another block.

    root: None where it takes no part in the prefix cache.  nodes: of its published blocks, from the first on; their
    blocks are those of the tables.  tail: the last of them, or the root.  announced: what it publishes next.
    """

    tables: tuple[list[int], ...]
    root: CacheRoot | None = None
    nodes: list[Node] = field(default_factory=list)
    tail: Node | None = None
    announced: NextBlock | None = None
    num_left: list[int] = field(default_factory=list)
    num_sent: list[int] = field(default_factory=list)
    has_news: bool = True
    num_writable: int = 0
    publishes_at: int = 0

    @classmethod
    def empty(cls, num_groups: int, root: CacheRoot | None) -> SequenceBlocks:
        tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        zeros = [0] * num_groups
        return cls(tables, root, num_left=list(zeros), num_sent=zeros)

    def copy(self) -> SequenceBlocks:
        """The same tables for another sequence, of which the executor knows nothing yet; without a tail."""
        return SequenceBlocks(
            tuple(list(table) for table in self.tables),
            self.root,
            list(self.nodes),
            num_left=list(self.num_left),
            num_sent=[0] * len(self.tables),
        )

    def replace(self, group: int, index: int, block: int) -> None:
        """Another block stands in the table from now on, of which the executor has to hear."""
        self.tables[group][index] = block
        self.num_sent[group] = min(self.num_sent[group], index)
        self.has_news = True

    def cut(self, group: int, end: int) -> None:
        """Drop a table's entries from index `end` on."""
        del self.tables[group][end:]
        self.num_sent[group] = min(self.num_sent[group], end)
        self.has_news, self.num_writable = True, 0

    def extend(self, group: int, blocks: list[int]) -> None:
        """More blocks stand at a table's end."""
        self.tables[group].extend(blocks)
        self.has_news = True

    def begin_at(self, group: int, num_left: int) -> None:
        """A table that was just filled: its first `num_left` blocks lie behind the window."""
        self.num_left[group] = num_left

    def leave(self, group: int, end: int, num_sink_blocks: int) -> list[int]:
        """The first `end` blocks of a table lie behind the window. Returns those that are given up now."""
        table, given_up = self.tables[group], []
        for index in range(max(self.num_left[group], num_sink_blocks), end):
            if table[index] != NULL_BLOCK:
                given_up.append(table[index])
                table[index] = NULL_BLOCK
        self.num_left[group] = max(self.num_left[group], end)
        return given_up

    def take_news(self) -> tuple[tuple[int, ...], BlockIds]:
        """(index, block ids from there on), by group: what the executor does not know yet; it does from now on. Two
        empty tuples where that is nothing."""
        if not self.has_news:
            return (), ()
        self.has_news = False
        firsts = tuple(self.num_sent)
        news = tuple([tuple(table[first:]) for table, first in zip(self.tables, firsts, strict=True)])
        self.num_sent = [len(table) for table in self.tables]
        return firsts, news
