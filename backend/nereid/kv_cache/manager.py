"""KVCacheManager: whose blocks are which. The one that allocates, shares and frees; knows ids and counts, no tensors.

Owns the block tables of the running sequences, over one pool that holds the prefix cache as well. A sequence is
admitted with what the cache holds of it, grows as its tokens are computed, publishes full blocks of computed tokens,
and is freed, or preempted: then what it has not published may be swapped out. The memory follows by operations, which
the next plan carries.

Invariants: a block's owners are the tables that hold it, and the tree if it does; whatever is written into has one
owner; the first blocks of a table are those of its nodes in the tree; a table only grows but for truncation, copies of
blocks that are shared, and blocks that have left every window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, TypeVar

from nereid.batch import BlockIds, Capacity, KVOp
from nereid.kv_cache.admission import Admission
from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.cached_pool import CachedPool
from nereid.kv_cache.costs import TransferCosts
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.growing import Growing
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import CacheRoot
from nereid.kv_cache.publishing import Publishing, TokenSource
from nereid.kv_cache.restoring import Restoring
from nereid.kv_cache.sequence_blocks import SequenceBlocks
from nereid.kv_cache.swapping import Swapping


class SequenceSource(TokenSource, Protocol):
    """A running sequence: its tokens, and how many of them are computed."""

    @property
    def request_id(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...


Source = TypeVar("Source", bound=SequenceSource)


class KVCacheManager:
    """Block tables by request id, one for each KV cache group, over one pool."""

    def __init__(
        self,
        num_blocks: int,
        layout: BlockLayout,
        num_host_blocks: int = 0,
        disk: DiskIndex | None = None,
        costs: TransferCosts | None = None,
    ) -> None:
        """num_blocks, num_host_blocks count the null block.  disk: None where nothing goes there."""
        costs = costs or TransferCosts()
        self._layout = layout
        self._groups = range(len(layout.groups))
        pays = costs.reload_pays(len(layout.groups), layout.block_size)
        self._pool = CachedPool(num_blocks, len(layout.groups), num_host_blocks, disk, reload_pays=pays)
        self._publishing = Publishing(self._pool, layout.block_size)
        self._swapping = Swapping(self._pool, layout, costs)
        self._restoring = Restoring(self._pool, layout, self._publishing.announcements, costs.bytes_per_block)
        self._admission = Admission(self._pool, layout, self._swapping)
        self._growing = Growing(self._pool, layout, self._restoring)
        self._sequences: dict[int, SequenceBlocks] = {}

    # ---- counts

    @property
    def num_blocks(self) -> int:
        """All blocks that requests can have."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones, and cached ones that nobody uses."""
        return self._pool.num_free

    @property
    def num_allocated(self) -> int:
        """Blocks that were handed out since the start."""
        return self._pool.num_allocated

    @property
    def max_tokens(self) -> int:
        """Most tokens that one request can have slots for with the whole pool to itself."""
        return self._layout.max_tokens(self._pool.num_blocks)

    @property
    def tables(self) -> Mapping[int, tuple[list[int], ...]]:
        """Block tables by request id and group; to be read only."""
        return {request_id: sequence.tables for request_id, sequence in self._sequences.items()}

    @property
    def held_blocks(self) -> set[int]:
        """Blocks whose contents matter, or are about to be read."""
        return {block for owned in self._owned() for block in owned}.union(self._pool.tree.blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of so many tokens holds at once, over all groups."""
        return self._layout.most_blocks_of_all(num_tokens)

    def steady(self, sources: Iterable[Source]) -> tuple[list[Source], list[Source]]:
        """Those sequences that have slots for all their tokens, and of whose tables the executor knows all, so that
        `grow` would change nothing; and the others."""
        sequences = self._sequences
        steady: list[Source] = []
        others: list[Source] = []
        for source in sources:
            own = sequences[source.request_id]
            fits = source.num_tokens <= own.num_writable and not own.has_news
            (steady if fits else others).append(source)
        return steady, others

    def num_missing_blocks(self, request_id: int, num_computed: int, num_tokens: int) -> int:
        """How many blocks a sequence may still need until its first `num_tokens` tokens are computed, and for copies of
        those that it will write into and others use."""
        return self._growing.num_missing(self._sequences[request_id], num_computed, num_tokens)

    def num_needed_blocks(self, match: Match, num_tokens: int) -> int:
        """How many blocks a sequence needs that starts behind `match`: all but those that others use already."""
        return self._admission.num_needed(match, num_tokens)

    def num_own_blocks(self, request_id: int) -> int:
        """How many blocks can be had when a sequence is freed."""
        tables = self._sequences[request_id].tables
        return sum(block != NULL_BLOCK and self._pool.num_users(block) == 1 for table in tables for block in table)

    # ---- before a sequence starts

    def match(self, root: CacheRoot | None, source: TokenSource, before: Match | None = None) -> Match:
        """What the cache holds of a sequence now. root: None where it takes no part.  before: what it held earlier, of
        the same tokens or fewer."""
        return self._admission.find(root, source.token_ids(0, source.num_tokens), before) if root else Match()

    def awaits(self, match: Match) -> bool:
        """Whether the block that `match` lacks is being computed for another sequence, or read from disk."""
        return match.next_block is not None and match.next_block in self._publishing.announcements

    def restore(self, root: CacheRoot | None, source: TokenSource, match: Match) -> bool:
        """Have read what the disk holds of a sequence behind `match`; returns whether it has to wait for that."""
        return root is not None and self._restoring.start(root, match, source.token_ids(0, source.num_tokens))

    def loaded(self, failed: Collection[str]) -> None:
        """What the last plan was to read has been read; failed: names of what was not."""
        self._restoring.conclude(failed)

    # ---- the life of a sequence

    def admit(self, request_id: int, root: CacheRoot | None, source: TokenSource, match: Match) -> int:
        """Give a sequence its tables, with what `match` found, or what it had when it was preempted, as far as there
        are blocks for it. Returns how many tokens that is."""
        sequence = self._sequences[request_id] = SequenceBlocks.empty(len(self._groups), root)
        num_tokens = self._admission.admit(request_id, sequence, source, match)
        self._publishing.settle(sequence, source)
        return num_tokens

    def grow(self, request_id: int, num_computed: int, num_tokens: int) -> int | None:
        """Give a sequence slots that it may write for the tokens from `num_computed` up to `num_tokens`.

        Returns how many blocks that took; None (and no block more) where there are too few.
        """
        return self._growing.grow(self._sequences[request_id], num_computed, num_tokens)

    def to_publish(self, sources: Iterable[Source]) -> list[Source]:
        """Those sequences that have computed blocks to publish."""
        sequences = self._sequences
        return [s for s in sources if s.num_computed_tokens >= sequences[s.request_id].publishes_at]

    def publish(self, request_id: int, source: TokenSource, num_computed: int) -> None:
        """Let others find the full blocks of a sequence's first `num_computed` tokens, which are computed and certain.

        Where another has published the same tokens, the sequence uses the other's block from now on.
        """
        self._publishing.publish(self._sequences[request_id], source, num_computed)

    def fork(self, request_id: int, child_id: int) -> None:
        """A second sequence with the blocks of the first, which are copied when one of the two writes into them.

        What the second had when it was preempted is not needed any more.
        """
        self._swapping.drop(child_id)
        parent = self._sequences[request_id]
        parent.num_writable = 0
        child = self._sequences[child_id] = parent.copy()
        for table in child.tables:
            self._pool.share(*table)
        self._publishing.settle(child, None)

    def truncate(self, request_id: int, num_tokens: int) -> None:
        """Give up what lies behind a sequence's first `num_tokens` tokens; those have not left any window."""
        sequence = self._sequences[request_id]
        self._growing.cut(sequence, num_tokens)
        del sequence.nodes[num_tokens // self._layout.block_size :]
        self._publishing.settle(sequence, None)

    def preempt(self, request_id: int, source: TokenSource, num_computed: int) -> None:
        """Give up a sequence's blocks for now; what is not published of its computed tokens may be swapped out."""
        self._swapping.swap_out(request_id, self._sequences[request_id], source, num_computed)
        self._free(request_id)

    def free(self, request_id: int) -> None:
        """Give up all that a sequence has, but for what it published; nothing happens where it has nothing."""
        self._swapping.drop(request_id)
        if request_id in self._sequences:
            self._free(request_id)

    def discard(self, request_id: int) -> None:
        """What a sequence has published, or found, is not to be found any more: its contents are in doubt."""
        sequence = self._sequences.get(request_id)
        if sequence and sequence.nodes:
            self._pool.detach(sequence.nodes[0])

    # ---- what the executor has to hear

    def take_news(self, request_id: int) -> tuple[tuple[int, ...], BlockIds]:
        """What has changed in a sequence's block tables since the last call; see ScheduledRequest."""
        return self._sequences[request_id].take_news()

    def take_ops(self) -> tuple[KVOp, ...]:
        """What is to be done to the memory since the last call, in this order."""
        return self._pool.take_ops()

    def store_all(self) -> list[KVOp]:
        """What writes all cached blocks to disk that are not there, so that they outlive the process."""
        return self._pool.tiers.store_all()

    # ---- inner

    def _free(self, request_id: int) -> None:
        sequence = self._sequences.pop(request_id)
        for index in reversed(range(max(map(len, sequence.tables)))):  # NOTE: so that leaves are evicted first
            self._pool.release(*[table[index] for table in sequence.tables if index < len(table)])
        self._publishing.leave(sequence)

    # ---- checks

    def _owned(self) -> Iterable[Iterable[int]]:
        yield from (table for sequence in self._sequences.values() for table in sequence.tables)
        yield self._restoring.blocks

    def check_integrity(self) -> None:
        """Raise AssertionError where an invariant of this room does not hold."""
        self._pool.check_integrity(self._owned(), self._swapping.host_blocks)
        for sequence in self._sequences.values():
            for index, node in enumerate(sequence.nodes):
                for table, block in zip(sequence.tables, node.blocks, strict=True):
                    assert table[index] in (NULL_BLOCK, block), "a table and its node in the tree disagree"

    def check_holds(self, request_id: int, num_tokens: int) -> None:
        """Raise AssertionError unless the sequence has slots for `num_tokens` tokens, and all that the next sees."""
        for group, table in enumerate(self._sequences[request_id].tables):
            end = self._layout.num_blocks(num_tokens)
            assert len(table) >= end, f"request {request_id}: {len(table)} blocks, {num_tokens} tokens"
            seen = self._layout.live(group, end, num_tokens)
            assert all(table[index] != NULL_BLOCK for index in seen), f"request {request_id}: a block is missing"


def make_kv_cache(capacity: Capacity, max_step_tokens: int) -> KVCacheManager:
    """The books for what an executor has room for. max_step_tokens: most tokens of a request in one step."""
    layout = BlockLayout(capacity.block_size, capacity.groups, max_step_tokens)
    names = capacity.stored_names
    disk = None if names is None else DiskIndex(capacity.fingerprint, names)
    costs = TransferCosts(capacity.bytes_per_block, capacity.rates)
    return KVCacheManager(capacity.num_blocks, layout, capacity.num_host_blocks, disk, costs)
