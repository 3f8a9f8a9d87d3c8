"""CacheBooks: a KV cache manager, and the books that a plain-Python model keeps beside it.

The model knows what every slot holds (ModelMemory), which blocks each sequence uses, and which published blocks are
there to be found (Records). Every call is made on both, and what the manager answers is compared with what the model
says. Nothing here reads the manager's tree. What is done with sequences is in tests/unit/kv_cache_model.py and
tests/unit/kv_cache_starts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from nereid.batch import KVOp, StoreBlock, SwapIn, SwapOut
from nereid.kv_cache.block_keys import child_name, root_name
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import CacheRoot
from tests.unit.kv_cache_memory import ModelMemory
from tests.unit.kv_cache_records import Age, Found, Records, Tokens

FINGERPRINT = "of the model"


@dataclass(eq=False)
class Modelled:
    """A sequence.

    root: where it publishes; a place of its own once that was discarded.  family: whose its contents are, its root's or
    its own and its forks'.  seen_from: position from which on its blocks are still needed.  num_nodes: published or
    found blocks.  announced: the block that it is going to publish next.  match: what was found when it was last looked
    for, while it waits.
    """

    request_id: int
    real_root: CacheRoot | None
    family: object
    known: list[int]
    root: object = None
    num_computed: int = 0
    seen_from: int = 0
    num_nodes: int = 0
    num_scheduled: int = 0
    announced: Found | None = None
    match: Match | None = None
    tables: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.known)

    @property
    def num_computed_tokens(self) -> int:
        return self.num_computed

    def token_ids(self, start: int, stop: int) -> Tokens:
        return tuple(self.known[start:stop])


class CacheBooks:
    """`events` counts what happened, so that a test can tell that it saw enough."""

    def __init__(
        self, num_blocks: int, layout: BlockLayout, events: Counter[str], num_host_blocks: int = 0, disk: bool = False
    ) -> None:
        """num_blocks, num_host_blocks: those that can be handed out."""
        self.layout, self.size = layout, layout.block_size
        self.groups = range(len(layout.groups))
        self.num_blocks, self.num_host_blocks, self._disk = num_blocks, num_host_blocks, disk
        self.events = events
        self.memory = ModelMemory(events)
        self.begin()

    def begin(self) -> None:
        """A process starts, with what is on disk."""
        self.believed = set(self.memory.files)  # names of what the manager may take to be on disk
        index = DiskIndex(FINGERPRINT, self.believed) if self._disk else None
        self.manager = KVCacheManager(self.num_blocks + 1, self.layout, self.num_host_blocks + 1, index)
        self.records = Records(self.layout)
        self.sequences: dict[int, Modelled] = {}
        self.loading: list[tuple[Found, int]] = []  # what the next run reads from disk, and into which block
        # While a sequence begins: what of its beginning is not to be evicted, and what has to come back from the host.
        self.protected: set[Found] = set()
        self.coming_back: set[Found] = set()
        self.leaving: set[int] = set()  # blocks of a sequence that is being preempted
        self.now = 0
        self._ops: list[KVOp] = []
        self._evicted: list[Age] = []
        self._num_discarded = 0

    def count(self, event: str, number: int) -> None:
        if number:
            self.events[event] += number

    # ---- what the model says

    def held(self, sequence: Modelled) -> Iterator[tuple[int, int, int]]:
        """(group, index, block) of all that a sequence uses."""
        for group, table in enumerate(sequence.tables):
            for index, block in enumerate(table):
                if self.records.visible(group, index, sequence.seen_from):
                    yield group, index, block

    def users(self) -> Counter[int]:
        """How many sequences use a block, or read it from disk."""
        users = Counter(block for sequence in self.sequences.values() for _, _, block in self.held(sequence))
        users.update(block for _, block in self.loading)
        return users

    def name(self, found: Found) -> str:
        """The name of a content on disk."""
        return child_name(self._name_before(found), found[1][-self.size :], found[2])

    def _name_before(self, found: Found) -> str:
        root, tokens, _ = found
        assert isinstance(root, CacheRoot), "what nobody can find is on disk"
        name = root_name(FINGERPRINT, root.salt, root.adapter)
        for start in range(0, len(tokens) - self.size, self.size):
            name = child_name(name, tokens[start : start + self.size], 0)
        return name

    # ---- what the manager hands out and gives up

    def follow_ops(self) -> list[KVOp]:
        """The operations that the last call asked for, to be carried out by the next run."""
        ops = list(self.manager.take_ops())
        self._ops += ops
        for op in ops:
            if isinstance(op, SwapOut) and op.block not in self.leaving:
                self._follow_offload(op)
            elif isinstance(op, SwapIn) and self.records.on_host.get(op.host_block) in self.coming_back:
                self.take(op.block)
                self.records.publish(self.records.on_host[op.host_block], op.block)
                self.events["copied back from the host"] += 1
            elif isinstance(op, StoreBlock):
                self._check_store(op)
        return ops

    def _follow_offload(self, op: SwapOut) -> None:
        self._note_evicted(op.block)
        assert isinstance(self.records.on_device[op.block][0], CacheRoot), "what nobody can find is kept"
        if gone := self.records.on_host.get(op.host_block):
            oldest = next(found for found in self.records.host if found not in self.protected)
            assert gone == oldest, "evicted from the host before an older one"
            assert not self._disk or self.name(gone) in self.believed, "not written to disk"
            self.events["evicted from the host"] += 1
        self.records.offload(op.block, op.host_block)

    def _check_store(self, op: StoreBlock) -> None:
        found = (self.records.on_host if op.on_host else self.records.on_device)[op.block]
        assert (op.key.token_ids, op.key.group) == (found[1][-self.size :], found[2]), "stored by another's tokens"
        assert (op.key.name, op.key.parent) == (self.name(found), self._name_before(found)), "stored by another's name"
        assert op.key.name not in self.believed, "written twice"
        self.believed.add(op.key.name)

    def _note_evicted(self, block: int) -> None:
        assert not self.users()[block], "a block in use is evicted"
        self._evicted.append(self.records.unused_since[block])

    def take(self, block: int) -> None:
        """A block was handed out; whoever published it has it no more."""
        assert not self.users()[block], "a block in use is handed out"
        if found := self.records.on_device.get(block):
            self._note_evicted(block)
            written = self._disk and not self.num_host_blocks and isinstance(found[0], CacheRoot)
            assert not written or self.name(found) in self.believed, "not written to disk"
        self.records.forget(block)

    def check_evicted(self) -> None:
        """What went since the last call was the least recently used."""
        evicted, self._evicted = self._evicted, []
        users, protected = self.users(), {self.records.device.get(found) for found in self.protected}
        left = [age for block, age in self.records.unused_since.items() if not users[block] and block not in protected]
        assert not evicted or not left or max(evicted) <= min(left), "evicted before one that was unused for longer"
        self.count("evicted", len(evicted))

    def take_new_blocks(self, sequence: Modelled, fresh_from: int) -> None:
        """Entries of its tables from `fresh_from` on were just handed out."""
        before = [list(table) for table in sequence.tables]
        changed = self.take_news(sequence)
        after, sequence.tables = sequence.tables, before
        for _, index, block in changed:
            if index >= fresh_from:
                self.take(block)
        sequence.tables = after

    def take_news(self, sequence: Modelled) -> list[tuple[int, int, int]]:
        """What the executor hears of a sequence's tables: (group, index, block) of all that changed."""
        changed = []
        for group, (first, blocks) in enumerate(zip(*self.manager.take_news(sequence.request_id), strict=True)):
            table = sequence.tables[group]
            assert first <= len(table), "news with a gap"
            before = dict(enumerate(table))
            table[first:] = blocks
            changed += [(group, i, block) for i, block in enumerate(table) if before.get(i) != block]
        return changed

    def recount(self, *, left_windows: bool = False, by_group: bool = False) -> None:
        """Which published blocks fell out of use now: the last ones go first, but those that left a window in order."""
        users = self.users()
        for block, (_, path, group) in self.records.on_device.items():
            if block in users:
                self.records.unused_since.pop(block, None)
            else:
                length = len(path) if left_windows else -len(path)
                order = (group if left_windows or by_group else 0, length)
                self.records.unused_since.setdefault(block, (self.now, *order))

    # ---- checks

    def check(self) -> None:
        """Raise AssertionError where the manager's books are wrong, or say other than the model."""
        users = self.users()
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.num_blocks - len(users), "free blocks"
        assert self.manager.held_blocks - {0} == users.keys() | self.records.on_device.keys(), "blocks in use or cached"
        for sequence in self.sequences.values():
            self._check_counts(sequence, users)
        if not self._disk:  # there, a block in the middle may turn out to be damaged
            for root, path, group in [*self.records.device, *self.records.host]:
                before = (root, path[: -self.size], group)
                windowed = self.layout.groups[group].window
                assert windowed or not before[1] or before in self.records, "a block out of reach is kept"

    def _check_counts(self, sequence: Modelled, users: Counter[int]) -> None:
        request_id, stop = sequence.request_id, sequence.num_tokens
        self.manager.check_holds(request_id, sequence.num_computed)
        held = list(self.held(sequence))
        own = self.manager.num_own_blocks(request_id)
        assert own == sum(users[block] == 1 for _, _, block in held), "blocks that it alone uses"
        first, missing = sequence.num_computed // self.size, 0
        for group, table in enumerate(sequence.tables):
            rule, most = self.layout.groups[group], self.layout.most_blocks(group, stop, sequence.num_computed)
            kept = [not rule.window or index * self.size < rule.num_sink_tokens for index in range(len(table))]
            # Another's block makes no room when it leaves the window.
            counted = sum(kept[index] or users[block] == 1 for other, index, block in held if other == group)
            missing += min(max(0, -(-stop // self.size) - len(table)), max(0, most - counted))
        shared = sum(users[b] > 1 or b in self.records.on_device for table in sequence.tables for b in table[first:])
        told = self.manager.num_missing_blocks(request_id, sequence.num_computed, stop)
        assert told == missing + shared, "blocks still needed, copies of shared ones included"
