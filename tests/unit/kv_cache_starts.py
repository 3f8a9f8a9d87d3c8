"""StartingCache: how sequences begin beside the KV cache manager: found, read from disk, preempted and swapped in."""

from __future__ import annotations

from dataclasses import dataclass

from nereid.batch import LoadBlock, SwapIn, SwapOut
from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import CacheRoot
from tests.unit.kv_cache_books import Modelled
from tests.unit.kv_cache_model import RunningCache
from tests.unit.kv_cache_records import Found, Tokens


@dataclass(frozen=True)
class Tail:
    """What a preempted sequence has on the host: host blocks by (group, index in the table), from index `first` on."""

    first: int
    blocks: dict[tuple[int, int], int]
    num_tokens: int


@dataclass(frozen=True)
class Plan:
    """How a sequence has to begin. count: full blocks that are found.  found: what of them is used.  sources: what is
    copied for the tokens behind them."""

    num_tokens: int
    count: int
    found: list[Found]
    sources: list[Found]
    tail: Tail | None


class StartingCache(RunningCache):
    """Sequences that wait are those that were preempted, and those that wait for what is read from disk."""

    def begin(self) -> None:
        super().begin()
        self.waiting: dict[int, tuple[Modelled, Tail | None]] = {}

    # ---- what is found

    def match(self, sequence: Modelled) -> Match:
        """The longest beginning of a sequence that need not be computed."""
        root, tokens = sequence.real_root, tuple(sequence.known)
        match = sequence.match = self.manager.match(root, sequence, sequence.match)
        longest = self.records.longest_hit(root, tokens) if root else (0, 0)
        assert (len(match.nodes), match.num_partial) == longest, f"found other than the longest, {longest}"
        stop = (longest[0] + 1) * self.size
        announced = {s.announced for s in self.sequences.values()} | {(*found[:2], 0) for found, _ in self.loading}
        awaited = len(tokens) > stop and (root, tokens[:stop], 0) in announced
        assert self.manager.awaits(match) == awaited, "who computes the next block"
        self.count("awaited", awaited)
        return match

    def _restores(self, sequence: Modelled, match: Match) -> bool:
        """Whether a sequence waits for what the disk holds of it."""
        self.now += 1
        root, tokens, start = sequence.real_root, tuple(sequence.known), len(match.nodes)
        may = self._may_read(root, tokens, start)
        found = self.records.needed(root, tokens, start, match.num_tokens)
        self.protected = set(found) & self.records.device.keys()
        blocks = {self.records.device[place] for place in self.protected} & self.records.unused_since.keys()
        must = may and self.num_blocks - len(self.users()) - len(blocks) >= len(self.groups)
        waits = self.manager.restore(root, sequence, match)
        loads = [op for op in self.follow_ops() if isinstance(op, LoadBlock)]
        assert bool(loads) == waits and (waits or not must), "what is on disk is not read"
        for number, op in enumerate(loads):
            index, group = start + number // len(self.groups), number % len(self.groups)
            place = (root, tokens[: (index + 1) * self.size], group)
            assert (index + 1) * self.size < len(tokens), "no token is left to compute"
            assert op.key.name == self.name(place) and op.key.name in self.believed, "something else is read"
            assert place not in self.records, "read for nothing"
            self.take(op.block)
            self.loading.append((place, op.block))
        self.check_evicted()
        self.protected = set()
        if may:  # then what was found is now the most recently used
            self.records.now_used(blocks)
            self.recount()
        return waits

    def _may_read(self, root: object, tokens: Tokens, start: int) -> bool:
        """Whether the block of index `start` is on disk and wanted."""
        wanted = tokens[: (start + 1) * self.size]
        if not root or not self._disk or len(tokens) <= len(wanted) or self._node_exists(root, wanted):
            return False
        return all(self.name((root, wanted, group)) in self.believed for group in self.groups)

    def _node_exists(self, root: object, path: Tokens) -> bool:
        """Whether the tree has a place for these tokens, be it without a block."""
        known = [found for found, _ in self.loading]
        known += [(s.root, s.token_ids(0, s.num_nodes * self.size), 0) for s in self.sequences.values()]
        behind = any(other == root and tokens[: len(path)] == path for other, tokens, _ in known)
        return behind or self.records.node_exists(root, path)

    # ---- how it begins

    def admit(self, request_id: int, root: CacheRoot | None, tokens: Tokens) -> None:
        """A new sequence. It waits for the disk, but not for others that compute what it lacks."""
        self._begin(Modelled(request_id, root, root or ("own", request_id), list(tokens)), None)

    def resume(self, request_id: int) -> None:
        """A sequence that waits goes on."""
        self._begin(*self.waiting.pop(request_id))

    def _begin(self, new: Modelled, tail: Tail | None) -> None:
        match = self.match(new)
        if self._restores(new, match):
            self.waiting[new.request_id] = (new, tail)
            return
        self.now += 1
        new.match = None
        plan = self._plan(new, match, tail)
        got = self.manager.admit(new.request_id, new.real_root, new, match)
        assert got == plan.num_tokens, f"{got} tokens instead of {plan.num_tokens}"
        new.root, new.num_computed, new.seen_from, new.num_nodes = new.real_root, got, got, plan.count
        new.tables = [[] for _ in self.groups]
        self.protected, self.coming_back = {*plan.found, *plan.sources}, set(plan.found)
        swaps = {op.block: op.host_block for op in self.follow_ops() if isinstance(op, SwapIn)}
        self._take_found(new, plan, swaps)
        self.protected, self.coming_back = set(), set()
        self.announce(new)
        self.recount()
        self.count("hit", bool(plan.count))
        self.count("hit in part of a block", bool(plan.sources))
        self.count("swapped in", plan.tail is not None)

    def _plan(self, new: Modelled, match: Match, tail: Tail | None) -> Plan:
        root, tokens, count = new.real_root, tuple(new.known), len(match.nodes)
        if tail and (tail.first > count or tail.num_tokens <= match.num_tokens):
            tail = None
        num_tokens = tail.num_tokens if tail else match.num_tokens
        found = self.records.needed(root, tokens, count, num_tokens)
        sources: list[Found] = []
        if match.partial and not tail:
            sources = [(root, tokens[: count * self.size] + match.partial.token_ids, group) for group in self.groups]
        on_host = [place for place in found if place not in self.records.device]
        of_tail = [index for _, index in tail.blocks if index >= count] if tail else []
        fresh = len(on_host) + len(sources) + len(of_tail)
        taken = sum(self.records.device.get(place) in self.records.unused_since for place in found + sources)
        if fresh + taken <= self.num_blocks - len(self.users()):
            return Plan(num_tokens, count, found, sources, tail)
        self.events["no room for what was found"] += 1
        found = self.records.needed(root, tokens, count, count * self.size)
        on_host = [place for place in found if place not in self.records.device]
        taken = sum(self.records.device.get(place) in self.records.unused_since for place in found)
        if len(on_host) + taken > self.num_blocks - len(self.users()):
            return Plan(0, 0, [], [], None)
        return Plan(count * self.size, count, found, [], None)

    def _take_found(self, new: Modelled, plan: Plan, swaps: dict[int, int]) -> None:
        """What its tables hold now is what was found, or newly handed out for a copy of it."""
        for place in plan.sources:
            self.records.touch(place, self.now)
        self.take_new_blocks(new, plan.count)
        for place in plan.found:
            index = len(place[1]) // self.size - 1
            assert new.tables[place[2]][index] == self.records.device.get(place), "not the block that was found"
        self.sequences[new.request_id] = new
        for (group, index), host_block in (plan.tail.blocks if plan.tail else {}).items():
            if index >= plan.count:
                assert swaps.pop(new.tables[group][index]) == host_block, "another block was swapped in"
        self.check_evicted()

    # ---- preemption

    def preempt(self, sequence: Modelled) -> None:
        """It gives up its blocks for now, and may keep what it has not published on the host."""
        self.now += 1
        first, stop = sequence.num_nodes, -(-sequence.num_computed // self.size)
        sequence.seen_from = sequence.num_computed
        own = {(group, index): block for group, index, block in self.held(sequence) if first <= index < stop}
        in_tails = sum(len(tail.blocks) for _, tail in self.waiting.values() if tail)
        self.manager.preempt(sequence.request_id, sequence, sequence.num_computed)
        self.leaving = set(own.values())
        swaps = {op.block: op.host_block for op in self.follow_ops() if isinstance(op, SwapOut)}
        self.leaving = set()
        room = len(own) <= self.num_host_blocks - in_tails and self.num_host_blocks > 0
        assert swaps.keys() == (set(own.values()) if room else set()), "not its unpublished blocks are swapped out"
        tail = Tail(first, {place: swaps[block] for place, block in own.items() if swaps}, sequence.num_computed)
        for host_block in swaps.values():
            self.records.forget_host(host_block)
        del self.sequences[sequence.request_id]
        self.recount()
        sequence.num_scheduled, sequence.announced = 0, None
        self.waiting[sequence.request_id] = (sequence, tail if swaps else None)
        self.events["preempted"] += 1

    def give_up(self, request_id: int) -> None:
        """A sequence that waits ends."""
        sequence, _ = self.waiting.pop(request_id)
        self.free(sequence)

    def end(self) -> None:
        for request_id in list(self.waiting):
            self.give_up(request_id)
        super().end()
