"""Admission: from what the prefix cache and the host's memory hold of a sequence to its first block tables.

Owns nothing; changes the pool that it is given, and the tables of the sequence. Always holds: what a match found is
taken hold of before a block is allocated, so that nothing of it is evicted for the rest.
"""

from __future__ import annotations

from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.cached_pool import CachedPool
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.matching import Match, find_match, found_blocks
from nereid.kv_cache.prefix_cache import CacheRoot, Node, TokenIds
from nereid.kv_cache.publishing import TokenSource
from nereid.kv_cache.sequence_blocks import SequenceBlocks
from nereid.kv_cache.swapping import SwappedTail, Swapping


class Admission:
    """Starts sequences over one pool."""

    def __init__(self, pool: CachedPool, layout: BlockLayout, swapping: Swapping) -> None:
        self._pool = pool
        self._layout = layout
        self._groups = range(len(layout.groups))
        self._swapping = swapping

    def find(self, root: CacheRoot, token_ids: TokenIds, before: Match | None) -> Match:
        """What the cache holds of a sequence, on the device and in the host's memory. before: see `find_match`."""
        return find_match(self._pool.tree, root, token_ids, self._layout, before)

    def num_needed(self, match: Match, num_tokens: int) -> int:
        """How many blocks have to be there for a sequence's first `num_tokens` tokens, beside what it found.

        What others use need not be there. But it makes no room when it leaves the window, neither for this sequence
        nor, from now on, for the one that had it to itself. The copy behind the full blocks may find no room.
        """
        match = self._full_blocks(match)
        most = [self._layout.most_blocks(group, num_tokens) for group in self._groups]
        taken = [self._layout.num_blocks(num_tokens) - len(match.nodes)] * len(self._groups)
        for node, group, index in found_blocks(match, self._layout, match.num_tokens):
            block = node.blocks[group]
            num_users = self._pool.num_users(block) if block != NULL_BLOCK else 0
            if num_users and self._layout.keeps(group, index):
                most[group] -= 1
            elif num_users < 2:
                taken[group] += 1
        return sum(map(min, most, taken))

    def admit(self, request_id: int, sequence: SequenceBlocks, source: TokenSource, match: Match) -> int:
        """Fill a sequence's empty tables. Returns of how many tokens they hold the KV."""
        tail = self._swapping.usable(request_id, source, match)
        if not self._has_room(match, tail):
            full, tail = self._full_blocks(match), None
            match = full if self._has_room(full, None) else Match()
        partial = None if tail else match.partial
        num_tokens = tail.num_tokens if tail else match.num_tokens
        with self._pool.held([(partial, group) for group in self._groups] if partial else []):
            self._take_found(sequence, match, num_tokens)
            if tail:
                self._swapping.swap_in(sequence, tail)
            if partial:
                self._copy_partial(sequence, partial)
        self._swapping.drop(request_id)
        for group in self._groups:
            left = min(self._layout.first_seen(group, num_tokens), len(sequence.tables[group]))
            sequence.begin_at(group, left)
        return num_tokens

    def _has_room(self, match: Match, tail: SwappedTail | None) -> bool:
        """Whether there are blocks for what has to be copied, beside what is found."""
        position = tail.num_tokens if tail else match.num_tokens
        found = [node.blocks[group] for node, group, _ in found_blocks(match, self._layout, position)]
        num_fresh = found.count(NULL_BLOCK)
        if tail:
            num_fresh += self._swapping.num_blocks(tail, len(match.nodes))
        elif match.partial:
            num_fresh += len(self._groups)
            found += match.partial.blocks
        num_taken = sum(block != NULL_BLOCK and not self._pool.num_users(block) for block in found)
        return num_fresh + num_taken <= self._pool.num_free

    def _full_blocks(self, match: Match) -> Match:
        """A match without the copy of a block."""
        return Match(match.nodes, num_tokens=len(match.nodes) * self._layout.block_size)

    def _take_found(self, sequence: SequenceBlocks, match: Match, position: int) -> None:
        sequence.nodes = list(match.nodes)
        for table in sequence.tables:
            table.extend([NULL_BLOCK] * len(match.nodes))
        on_host = []
        for node, group, index in found_blocks(match, self._layout, position):
            if node.blocks[group] == NULL_BLOCK:
                self._pool.tiers.host.claim(node, group)
                on_host.append((node, group, index))
            else:
                sequence.tables[group][index] = node.blocks[group]
                self._pool.share(node.blocks[group])
        fresh = self._pool.allocate(len(on_host))
        assert fresh is not None, "there was room for what is copied back"
        for (node, group, index), block in zip(on_host, fresh, strict=True):
            self._pool.bring_back(node, group, block)
            sequence.tables[group][index] = block

    def _copy_partial(self, sequence: SequenceBlocks, node: Node) -> None:
        fresh = self._pool.allocate(len(self._groups))
        assert fresh is not None, "there was room for the copies"
        for group, block in enumerate(fresh):
            self._pool.copy(node, group, block)
            sequence.tables[group].append(block)
