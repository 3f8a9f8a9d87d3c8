"""RunningCache: what is done with running sequences, on a KV cache manager and on the model beside it."""

from __future__ import annotations

from nereid.batch import StoreBlock
from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import CacheRoot
from tests.unit.kv_cache_books import CacheBooks, Modelled
from tests.unit.kv_cache_records import Tokens


class RunningCache(CacheBooks):
    """Sequences that were admitted, until they are freed."""

    def schedule(self, sequence: Modelled, count: int) -> bool:
        """Slots for `count` tokens, to be written by `run`; false where there are too few blocks."""
        self.now += 1
        start, stop = sequence.num_computed, sequence.num_computed + count
        sequence.seen_from = start
        self.recount(left_windows=True)
        users, needed = self.users(), 0
        for table in sequence.tables:
            for index in range(start // self.size, -(-stop // self.size)):
                needed += index >= len(table) or users[table[index]] > 1 or table[index] in self.records.on_device
        free = self.num_blocks - len(users)
        if needed > free and self.loading:  # what is being read is given up for a running sequence
            free += len(self.loading)
            self.loading.clear()
            self.events["reading given up"] += 1
        steady, _ = self.manager.steady([sequence])
        assert not (steady and needed), "said to have what it needs"
        added = self.manager.grow(sequence.request_id, start, stop)
        assert added == (needed if needed <= free else None), f"{added} blocks came, {needed} needed, {free} free"
        self.follow_ops()
        self.take_new_blocks(sequence, start // self.size)
        self.check_evicted()
        self.now += 1
        self.recount()
        self.count("too few blocks", added is None)
        if added is not None:
            sequence.num_scheduled = count
        return added is not None

    def run(self, drawn: Tokens, num_uncertain: int = 0, *, writes_fail: bool = False) -> None:
        """What an executor does with a step: the operations, then all writes, then all reads. Sequences without a token
        left get one of `drawn`; all but the last `num_uncertain` computed tokens are published."""
        self.now += 1
        ops, self._ops = self._ops, []
        failed = self.memory.carry_out(ops, writes_fail=writes_fail)
        scheduled = [sequence for sequence in self.sequences.values() if sequence.num_scheduled]
        for sequence in scheduled:
            self._write(sequence)
        for sequence in self.sequences.values():
            self._read(sequence)
        self._take_loaded(failed)
        for index, sequence in enumerate(scheduled):
            if sequence.num_computed == sequence.num_tokens:
                sequence.known.append(drawn[index % len(drawn)])
            self._publish(sequence, max(0, sequence.num_computed - num_uncertain))
        self.recount()

    def _take_loaded(self, failed: set[str]) -> None:
        self.manager.loaded(failed)
        self.believed -= failed
        for found, block in self.loading:
            if isinstance(found[0], CacheRoot) and self.name(found) not in failed:
                self.records.publish(found, block)
                self.events["loaded"] += 1
        self.count("not loaded", len(failed))
        self.loading.clear()

    def fork(self, parent: Modelled, request_id: int) -> None:
        """A second sequence that goes on from the same tokens."""
        child = Modelled(
            request_id, parent.real_root, parent.family, list(parent.known), parent.root, parent.num_computed,
            parent.seen_from, parent.num_nodes, tables=[[] for _ in self.groups],
        )  # fmt: skip
        self.manager.fork(parent.request_id, request_id)
        self.sequences[request_id] = child
        self.take_news(child)
        assert list(self.held(child)) == list(self.held(parent)), "a fork's blocks are not its parent's"
        self.events["fork"] += 1

    def truncate(self, sequence: Modelled, num_tokens: int) -> None:
        """Only the first `num_tokens` computed tokens are kept."""
        self.now += 1
        self.count("truncated within a found block", num_tokens < sequence.num_nodes * self.size)
        self.manager.truncate(sequence.request_id, num_tokens)
        del sequence.known[num_tokens:]
        sequence.num_computed = num_tokens
        sequence.num_nodes = min(sequence.num_nodes, num_tokens // self.size)
        sequence.root = sequence.root if sequence.num_nodes else sequence.real_root
        sequence.announced = None
        for table in sequence.tables:
            del table[-(-num_tokens // self.size) :]
        assert not self.take_news(sequence), "new blocks of a truncated sequence"
        self.recount(by_group=True)

    def free(self, sequence: Modelled) -> None:
        self.now += 1
        self.manager.free(sequence.request_id)
        self.sequences.pop(sequence.request_id, None)
        self.recount()

    def discard(self, sequence: Modelled) -> None:
        """What a sequence has published, and all that follows on its first block, is found no more."""
        self.manager.discard(sequence.request_id)
        if not sequence.num_nodes:
            return
        self._num_discarded += 1
        first, root, nowhere = sequence.token_ids(0, self.size), sequence.root, ("nowhere", self._num_discarded)
        for other in self.sequences.values():
            if other.root == root and other.num_nodes and other.token_ids(0, self.size) == first:
                other.root = nowhere
                other.announced = (nowhere, *other.announced[1:]) if other.announced else None
        for number, ((other_root, path, group), block) in enumerate(self.loading):
            if other_root == root and path[: self.size] == first:
                self.loading[number] = (nowhere, path, group), block
        self.records.detach(root, first, set(self.users()), nowhere)
        self.events["discarded"] += 1

    # ---- what a step does

    def _write(self, sequence: Modelled) -> None:
        users, stop = self.users(), sequence.num_computed + sequence.num_scheduled
        for group, table in enumerate(sequence.tables):
            for position in range(sequence.num_computed, stop):
                block = table[position // self.size]
                assert users[block] == 1 and block not in self.records.on_device, "a shared block is written"
                written = (group, sequence.family, sequence.token_ids(0, position + 1))
                self.memory.write(block, position % self.size, written)
        sequence.num_computed, sequence.num_scheduled = stop, 0

    def _read(self, sequence: Modelled) -> None:
        """All that the tokens from `seen_from` on look at, up to the last computed one."""
        for group, index, block in self.held(sequence):
            for position in range(index * self.size, min((index + 1) * self.size, sequence.num_computed)):
                rule = self.layout.groups[group]
                if not rule.window or position > sequence.seen_from - rule.window or position < rule.num_sink_tokens:
                    expected = (group, sequence.family, sequence.token_ids(0, position + 1))
                    assert self.memory.read(block, position % self.size) == expected, "a slot holds something else"

    def _publish(self, sequence: Modelled, num_certain: int) -> None:
        has_more = sequence.root is not None and sequence.num_computed // self.size > sequence.num_nodes
        assert bool(self.manager.to_publish([sequence])) == has_more, "computed blocks to publish"
        self.manager.publish(sequence.request_id, sequence, num_certain)
        replaced, num_before = set(), sequence.num_nodes
        own = {(group, index): block for group, index, block in self.held(sequence)}
        for index in range(sequence.num_nodes, num_certain // self.size if sequence.root else 0):
            path = sequence.token_ids(0, (index + 1) * self.size)
            for group in self.groups:
                if (block := own.get((group, index))) is not None:
                    known = self.records.device.get((sequence.root, path, group))
                    if known is None:
                        self.records.publish((sequence.root, path, group), block)
                    elif known != block:
                        replaced.add((group, index, known))
            sequence.num_nodes = index + 1
        assert set(self.take_news(sequence)) == replaced, "not the blocks that others have published"
        self.count("found another's block when publishing", bool(replaced))
        if sequence.num_nodes > num_before:
            self.announce(sequence)

    def announce(self, sequence: Modelled) -> None:
        """What it is going to publish next, where its tokens are known."""
        stop = (sequence.num_nodes + 1) * self.size
        known = sequence.root is not None and stop <= sequence.num_tokens
        sequence.announced = (sequence.root, sequence.token_ids(0, stop), 0) if known else None

    # ---- the end of a process

    def end(self) -> None:
        """All sequences end, and what is cached is written to disk. Raise AssertionError unless then all blocks can be
        had, and nothing is kept of any sequence."""
        for sequence in list(self.sequences.values()):
            self.free(sequence)
        self.run((0,))
        self._store_all()
        self.check()
        manager = self.manager
        assert manager.num_free_blocks == self.num_blocks
        assert not len(manager._publishing.announcements), "an announcement is kept"
        roots = {root for root, _, _ in self.records.device if isinstance(root, CacheRoot)}
        self._evict_all()
        if not manager.held_blocks - {0} and not self.num_host_blocks:
            assert not any(map(manager._pool.tree.find_root, roots)), "a root is kept"

    def _store_all(self) -> None:
        ops = self.manager.store_all()
        assert self._disk or not ops, "there is no disk to write to"
        for op in ops:
            assert isinstance(op, StoreBlock), "something else than writing"
            self._check_store(op)
        self.memory.carry_out(ops, writes_fail=False)
        cached = [found for found in [*self.records.device, *self.records.host] if isinstance(found[0], CacheRoot)]
        assert not self._disk or all(self.name(found) in self.believed for found in cached), "a block is not written"

    def _evict_all(self) -> None:
        """Ask for all blocks, as far as all groups get equally many."""
        self.manager.admit(-1, None, Modelled(-1, None, "all", [0]), Match())
        num_tokens = self.num_blocks // len(self.groups) * self.size
        assert self.manager.grow(-1, 0, num_tokens) is not None, "blocks that are free cannot be had"
        self.manager.free(-1)
        self.manager.check_integrity()
