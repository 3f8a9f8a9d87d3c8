"""Swapping: what preempted sequences have in the host's memory, beyond what the prefix cache keeps of them.

Owns these tails. A tail begins at a block's edge, behind the blocks that were published, and ends with the last
computed token; a sequence without a part in the prefix cache is all tail. It is swapped out where that takes less time
than to compute it anew, and there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereid.batch import SwapIn, SwapOut
from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.cached_pool import CachedPool
from nereid.kv_cache.costs import TransferCosts
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import TokenIds
from nereid.kv_cache.publishing import TokenSource
from nereid.kv_cache.sequence_blocks import SequenceBlocks


@dataclass(frozen=True, slots=True)
class SwappedTail:
    """first: index in the block tables of its first block.  host_blocks: by group, from there on; NULL_BLOCK where the
    block had left the window.  num_tokens: of the whole sequence, that are computed.  token_ids: those of the tail."""

    first: int
    host_blocks: tuple[tuple[int, ...], ...]
    num_tokens: int
    token_ids: TokenIds

    def from_index(self, start: int) -> list[list[int]]:
        """Host blocks by group, for the tables from index `start` on."""
        return [list(blocks[start - self.first :]) for blocks in self.host_blocks]

    @property
    def blocks(self) -> list[int]:
        return [block for blocks in self.host_blocks for block in blocks if block != NULL_BLOCK]


class Swapping:
    """Tails by request id."""

    def __init__(self, pool: CachedPool, layout: BlockLayout, costs: TransferCosts) -> None:
        self._pool = pool
        self._host = pool.tiers.host
        self._layout = layout
        self._costs = costs
        self._tails: dict[int, SwappedTail] = {}

    @property
    def host_blocks(self) -> list[int]:
        """All host blocks in tails."""
        return [block for tail in self._tails.values() for block in tail.blocks]

    def swap_out(self, request_id: int, sequence: SequenceBlocks, source: TokenSource, num_computed: int) -> None:
        """Keep the unpublished part of a sequence that is about to be freed, where that is worth it."""
        first, end = len(sequence.nodes), self._layout.num_blocks(num_computed)
        seen = [set(self._layout.live(group, end, num_computed)) for group in range(len(sequence.tables))]
        parts = [
            [table[index] if index in live else NULL_BLOCK for index in range(first, end)]
            for table, live in zip(sequence.tables, seen, strict=True)
        ]
        count = sum(block != NULL_BLOCK for part in parts for block in part)
        token_ids = source.token_ids(first * self._layout.block_size, num_computed)
        if not count or not self._host.exists or not self._costs.swap_pays(count, len(token_ids)):
            return
        room = self._pool.tiers.make_room(count)
        if room is None:
            return
        self._pool.do(*room)
        host_blocks = tuple(tuple(map(self._swap_out_block, part)) for part in parts)
        self._tails[request_id] = SwappedTail(first, host_blocks, num_computed, token_ids)

    def _swap_out_block(self, block: int) -> int:
        if block == NULL_BLOCK:
            return NULL_BLOCK
        host_block = self._host.allocate()
        self._pool.do(SwapOut(block, host_block))
        return host_block

    def usable(self, request_id: int, source: TokenSource, match: Match) -> SwappedTail | None:
        """A sequence's tail, where it goes on from what the prefix cache holds, and further than that.

        NOTE: what is before the tail is not compared; who goes on with other tokens drops it.
        """
        tail = self._tails.get(request_id)
        if tail is None or tail.first > len(match.nodes) or tail.num_tokens <= match.num_tokens:
            return None
        begins = source.token_ids(tail.first * self._layout.block_size, tail.num_tokens)
        return tail if tail.token_ids == begins else None

    def num_blocks(self, tail: SwappedTail, start: int) -> int:
        """Blocks of the device that it takes for the tables from index `start` on."""
        return sum(block != NULL_BLOCK for part in tail.from_index(start) for block in part)

    def swap_in(self, sequence: SequenceBlocks, tail: SwappedTail) -> None:
        """Let a sequence go on with its tail, for which there are blocks. The tail is to be dropped."""
        for table, part in zip(sequence.tables, tail.from_index(len(sequence.nodes)), strict=True):
            for host_block in part:
                if host_block == NULL_BLOCK:
                    table.append(NULL_BLOCK)
                    continue
                (block,) = self._pool.allocate(1) or (NULL_BLOCK,)
                assert block != NULL_BLOCK, "there was room for the tail"
                self._pool.do(SwapIn(host_block, block))
                table.append(block)

    def drop(self, request_id: int) -> None:
        """A sequence's tail is not needed any more; nothing happens where it has none."""
        if tail := self._tails.pop(request_id, None):
            for block in tail.blocks:
                self._host.release(block)
