"""How many blocks sequences are said to need: who starts where there are as many, and nobody's known tokens run out."""

from __future__ import annotations

import random

import pytest

from nereid.batch import BlockGroup
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.prefix_cache import CacheRoot
from tests.unit.kv_cache_books import Modelled

GROUPS = [
    (BlockGroup(),),
    (BlockGroup(5),),
    (BlockGroup(6, 2),),
    (BlockGroup(), BlockGroup(4)),
    (BlockGroup(1), BlockGroup(12, 5)),
    (BlockGroup(), BlockGroup(7, 3), BlockGroup(7, 3)),
]


class Runs:
    """Sequences over one small pool, with beginnings in common."""

    def __init__(self, rng: random.Random, groups: tuple[BlockGroup, ...]) -> None:
        self.rng, self.size, self.most_at_once = rng, rng.choice([1, 2, 4]), rng.choice([1, 3, 8])
        layout = BlockLayout(self.size, groups, self.most_at_once)
        self.cache = KVCacheManager(1 + rng.randint(4, 30) * len(groups), layout, rng.choice([0, 0, 20]))
        self.sequences: list[Modelled] = []
        self.num_grown = 0

    @property
    def num_spare(self) -> int:
        """Blocks that no sequence needs for its known tokens, as a scheduler counts them."""
        needed = [self.cache.num_missing_blocks(s.request_id, s.num_computed, s.num_tokens) for s in self.sequences]
        return self.cache.num_free_blocks - sum(needed)

    def start(self) -> None:
        """Up to three, as long as there is room."""
        num_spare = self.num_spare
        for _ in range(self.rng.randint(1, 3)):
            tokens = [int(self.rng.random() < 0.02) for _ in range(self.rng.randint(1, 40))]
            new = Modelled(self.rng.getrandbits(60), CacheRoot(""), None, tokens)
            match = self.cache.match(new.real_root, new)
            if (needed := self.cache.num_needed_blocks(match, len(tokens))) <= num_spare:
                num_spare -= needed
                new.num_computed = self.cache.admit(new.request_id, new.real_root, new, match)
                self.sequences.append(new)

    def fork(self) -> None:
        """A sequence of which all is computed, where there is room for the block that both write into next."""
        parent = self.rng.choice(self.sequences)
        if parent.num_computed == parent.num_tokens and self.cache.num_blocks_for(1) <= self.num_spare:
            child = Modelled(self.rng.getrandbits(60), parent.real_root, None, list(parent.known))
            child.num_computed = parent.num_computed
            self.cache.fork(parent.request_id, child.request_id)
            self.sequences.append(child)

    def draw(self) -> None:
        """More tokens of some sequences, if there is room for them."""
        for sequence in self.rng.sample(self.sequences, self.rng.randint(1, len(self.sequences))):
            sequence.known += [int(self.rng.random() < 0.5)] * self.rng.randint(1, 3)
            if self.num_spare < 0:
                self.end(sequence)

    def advance(self) -> None:
        """A chunk of a sequence's known tokens, for which there have to be blocks."""
        sequence = self.rng.choice(self.sequences)
        stop = min(sequence.num_computed + self.rng.randint(1, self.most_at_once), sequence.num_tokens)
        if stop > sequence.num_computed:
            added = self.cache.grow(sequence.request_id, sequence.num_computed, stop)
            assert added is not None, "too few blocks for known tokens"
            sequence.num_computed = stop
            self.cache.publish(sequence.request_id, sequence, stop)
            self.num_grown += 1

    def end(self, sequence: Modelled) -> None:
        self.cache.free(sequence.request_id)
        self.sequences.remove(sequence)

    def do(self) -> None:
        if not self.sequences:
            return self.start()
        choice = self.rng.random()
        if choice < 0.85:
            self.advance()
        elif choice < 0.95:
            self.rng.choice([self.start, self.fork, self.draw])()
        elif choice < 0.96:
            self.end(self.rng.choice(self.sequences))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_there_are_blocks_for_all_known_tokens_of_who_was_started(groups: tuple[BlockGroup, ...]) -> None:
    num_grown = 0
    for seed in range(200):
        runs = Runs(random.Random(seed), groups)
        for _ in range(150):
            runs.do()
        num_grown += runs.num_grown
    assert num_grown > 4000
