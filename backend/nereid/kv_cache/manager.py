"""KVCacheManager: the block table of every request. The one that allocates and frees; knows ids and counts, no tensors.

Invariants: a table holds exactly the blocks for the slots it was asked for; it only grows, until it is freed whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from nereid.batch import BlockIds
from nereid.kv_cache.block_pool import BlockPool


class KVCacheManager:
    """Block tables by request id, one for each KV cache group, over one pool."""

    def __init__(self, num_blocks: int, group_block_sizes: tuple[int, ...]) -> None:
        """num_blocks counts the null block; group_block_sizes: tokens a block, by group."""
        self._pool = BlockPool(num_blocks)
        self._block_sizes = group_block_sizes
        self._tables: dict[int, tuple[list[int], ...]] = {}

    @property
    def max_tokens(self) -> int:
        """Most tokens that one request can have slots for with the whole pool to itself."""
        num_groups = len(self._block_sizes)
        return self._pool.num_blocks // num_groups * min(self._block_sizes)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self._pool.num_in_use / self._pool.num_blocks

    @property
    def num_blocks(self) -> int:
        """All blocks that requests can have."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def num_missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """How many blocks the request still needs for its first `num_tokens` tokens, over all groups."""
        return sum(self._missing(self._tables.get(request_id) or self._no_tables(), num_tokens))

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens of one request take, over all groups."""
        return sum(self._missing(self._no_tables(), num_tokens))

    def _no_tables(self) -> tuple[list[int], ...]:
        return tuple([] for _ in self._block_sizes)

    def _missing(self, tables: tuple[list[int], ...], num_tokens: int) -> list[int]:
        return [
            max(0, -(-num_tokens // size) - len(table)) for size, table in zip(self._block_sizes, tables, strict=True)
        ]

    @property
    def tables(self) -> Mapping[int, tuple[list[int], ...]]:
        """Block tables by request id and group; not to be changed by the reader."""
        return self._tables

    def grow(self, request_id: int, num_tokens: int) -> BlockIds | None:
        """Give the request slots for its first `num_tokens` tokens.

        Returns the blocks added, by group; None (and nothing changed) where the pool has too few.
        """
        tables = self._tables.get(request_id) or self._no_tables()
        missing = self._missing(tables, num_tokens)
        blocks = self._pool.allocate(sum(missing))
        if blocks is None:
            return None
        added, start = [], 0
        for table, count in zip(tables, missing, strict=True):
            added.append(blocks[start : start + count])
            table.extend(added[-1])
            start += count
        self._tables[request_id] = tables
        return tuple(added)

    def free(self, request_id: int) -> None:
        """Release the request's blocks; nothing happens where it has none."""
        for table in self._tables.pop(request_id, ()):
            self._pool.release(table)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or in exactly as many tables as it has owners."""
        self._pool.check_integrity(table for tables in self._tables.values() for table in tables)

    def check_holds(self, request_id: int, num_tokens: int) -> None:
        """Raise AssertionError unless the request has slots for `num_tokens` tokens."""
        tables = self._tables.get(request_id, ())
        for table, size in zip(tables, self._block_sizes, strict=True):
            assert len(table) * size >= num_tokens, f"request {request_id}: {len(table)} blocks, {num_tokens} tokens"
