"""A Hypothesis state machine over the KV cache manager and the plain-Python model of tests/unit/kv_cache_*.py.

Few tokens and small blocks, so that hits, hits in part of a block and copies are frequent; pools of few blocks, so that
they run out; host memory and a disk whose writes may fail and whose files may be lost; new processes. 20,000 steps, and
1,000,000 with `./nereid test -m slow`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from nereid.batch import BlockGroup
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.prefix_cache import CacheRoot
from tests.unit.kv_cache_books import Modelled
from tests.unit.kv_cache_records import Tokens
from tests.unit.kv_cache_starts import StartingCache

MAX_SEQUENCES, MAX_TOKENS = 5, 40
FULL = BlockGroup()
GROUPS = [
    (FULL,),
    (FULL, FULL),
    (BlockGroup(5),),
    (BlockGroup(6, 2),),
    (FULL, BlockGroup(1)),
    (FULL, BlockGroup(4)),
    (FULL, BlockGroup(7, 3), BlockGroup(7, 3)),
    (BlockGroup(3), BlockGroup(9)),
]
ROOTS = [*[CacheRoot("")] * 5, CacheRoot("a"), CacheRoot("", ""), None]


def some_of(values: Tokens, min_size: int, max_size: int) -> st.SearchStrategy[Tokens]:
    """Tuples of those values, each drawn as one string of bytes, which is quicker than one by one."""
    strings = st.binary(min_size=min_size, max_size=max_size)
    return strings.map(lambda string: tuple(values[byte % len(values)] for byte in string))


TOKENS = (0, 0, 0, 1, 1, 2)
SOME_TOKENS = some_of(TOKENS, 0, 12)
DRAWN = some_of(TOKENS, MAX_SEQUENCES, MAX_SEQUENCES)
COUNTS = some_of((1, 3, MAX_TOKENS), MAX_SEQUENCES, MAX_SEQUENCES)
COMMON = {
    "hit", "hit in part of a block", "awaited", "evicted", "too few blocks", "found another's block when publishing",
    "fork", "truncated within a found block", "discarded", "preempted", "swapped in", "loaded", "evicted from the host",
    "CopyBlock", "SwapOut", "SwapIn", "StoreBlock", "LoadBlock",
}  # fmt: skip
PICK = st.integers(0, MAX_SEQUENCES - 1)


def any_runs(machine: CacheMachine) -> bool:
    return bool(machine.cache.sequences)


def may_begin(machine: CacheMachine) -> bool:
    return len(machine.cache.sequences) < MAX_SEQUENCES


def any_waits(machine: CacheMachine) -> bool:
    return bool(machine.cache.waiting)


def any_is_scheduled(machine: CacheMachine) -> bool:
    """Or is being read from disk."""
    scheduled = any(sequence.num_scheduled for sequence in machine.cache.sequences.values())
    return scheduled or bool(machine.cache.loading)


class CacheMachine(stateful.RuleBasedStateMachine):
    """Sequences are told by their place among those that run."""

    def __init__(self, events: Counter[str]) -> None:
        super().__init__()
        self.events = events
        self.next_id = 0
        self.past: list[Tokens] = [()]  # of sequences that were admitted, for others to begin alike

    @stateful.initialize(
        size=st.sampled_from([1, 2, 3, 4, 4, 6]), groups=st.sampled_from(GROUPS), room=st.sampled_from([6, 8, 12, 40]),
        on_host=st.sampled_from([0, 0, 2, 6, 100]), disk=st.sampled_from([False, True, True]),
    )  # fmt: skip
    def start(self, size: int, groups: tuple[BlockGroup, ...], room: int, on_host: int, disk: bool) -> None:
        layout = BlockLayout(size, groups)
        self.cache = StartingCache(room * len(groups), layout, self.events, on_host * len(groups), disk)

    def pick(self, place: int) -> Modelled:
        sequences = list(self.cache.sequences.values())
        return sequences[place % len(sequences)]

    @stateful.precondition(may_begin)
    @stateful.rule(
        root=st.sampled_from(ROOTS), like=st.integers(0, 5), drop=st.sampled_from([0, 0, 0, 1, 3, 6]), tail=SOME_TOKENS
    )
    def admit(self, root: CacheRoot | None, like: int, drop: int, tail: Tokens) -> None:
        """A prompt that begins like an earlier one, the latest first."""
        past = self.past[-1 - like % len(self.past)]
        tokens = (*past[: len(past) - drop], *tail)[: MAX_TOKENS - 8] or (0,)
        self.next_id += 1
        self.cache.admit(self.next_id, root, tokens)
        self.past.append(tokens)

    @stateful.precondition(any_runs)
    @stateful.rule(place=PICK, count=st.integers(1, MAX_TOKENS))
    def schedule(self, place: int, count: int) -> None:
        self.schedule_up_to(self.pick(place), count)

    def schedule_up_to(self, sequence: Modelled, count: int) -> None:
        """Where there is no room, it is preempted, as a scheduler would."""
        left = sequence.num_tokens - sequence.num_computed - sequence.num_scheduled
        if left and not self.cache.schedule(sequence, sequence.num_scheduled + min(left, count)):
            self.cache.preempt(sequence)

    @stateful.precondition(any_is_scheduled)
    @stateful.rule(drawn=DRAWN, num_uncertain=st.sampled_from([0, 0, 0, 1, 3]), seldom=st.integers(0, 3))
    def run(self, drawn: Tokens, num_uncertain: int, seldom: int) -> None:
        self.cache.run(drawn, num_uncertain, writes_fail=not seldom)
        self.end_long_ones()

    @stateful.rule(drawn=DRAWN, counts=COUNTS, resumes=st.integers(0, 2))
    def step(self, drawn: Tokens, counts: Tokens, resumes: int) -> None:
        for request_id in list(self.cache.waiting)[:resumes]:
            if may_begin(self):
                self.cache.resume(request_id)
        for sequence, count in zip(list(self.cache.sequences.values()), counts, strict=False):
            self.schedule_up_to(sequence, count)
        self.cache.run(drawn)
        self.end_long_ones()

    def end_long_ones(self) -> None:
        for sequence in list(self.cache.sequences.values()):
            if sequence.num_tokens > MAX_TOKENS:
                self.end(sequence)

    def end(self, sequence: Modelled) -> None:
        self.past.append(tuple(sequence.known))
        self.cache.free(sequence)

    @stateful.precondition(lambda machine: any_runs(machine) and may_begin(machine))
    @stateful.rule(place=PICK, seldom=st.integers(0, 2))
    def fork(self, place: int, seldom: int) -> None:
        parent = self.pick(place)
        if not seldom and not parent.num_scheduled:
            self.next_id += 1
            self.cache.fork(parent, self.next_id)

    @stateful.precondition(any_runs)
    @stateful.rule(place=PICK, back=st.integers(0, 12), tail=SOME_TOKENS)
    def truncate(self, place: int, back: int, tail: Tokens) -> None:
        sequence = self.pick(place)
        if not sequence.num_scheduled:
            windows = any(rule.window for rule in self.cache.layout.groups)
            first = sequence.seen_from if windows else 0  # what has left a window is not there any more
            self.cache.truncate(sequence, max(first, sequence.num_computed - back))
            sequence.known += tail or (0,)

    @stateful.precondition(any_runs)
    @stateful.rule(place=PICK, seldom=st.integers(0, 2))
    def preempt(self, place: int, seldom: int) -> None:
        if not seldom:
            self.cache.preempt(self.pick(place))

    @stateful.precondition(lambda machine: any_waits(machine) and may_begin(machine))
    @stateful.rule(place=PICK)
    def resume(self, place: int) -> None:
        self.cache.resume(self.pick_waiting(place))

    @stateful.precondition(any_waits)
    @stateful.rule(place=PICK)
    def look(self, place: int) -> None:
        sequence, _ = self.cache.waiting[self.pick_waiting(place)]
        self.cache.match(sequence)

    @stateful.precondition(any_waits)
    @stateful.rule(place=PICK, seldom=st.integers(0, 3))
    def give_up(self, place: int, seldom: int) -> None:
        if not seldom:
            self.cache.give_up(self.pick_waiting(place))

    def pick_waiting(self, place: int) -> int:
        waiting = list(self.cache.waiting)
        return waiting[place % len(waiting)]

    @stateful.precondition(lambda machine: machine.cache.memory.files)
    @stateful.rule(first=st.integers(0, 2), seldom=st.integers(0, 3))
    def lose_files(self, first: int, seldom: int) -> None:
        """Every third, or all."""
        files = self.cache.memory.files
        for name in sorted(files)[first :: 3 if seldom else 1]:
            del files[name]

    @stateful.rule(seldom=st.integers(0, 5))
    def restart(self, seldom: int) -> None:
        """In a new process, with what is on disk."""
        if not seldom:
            self.cache.end()
            self.cache.begin()

    @stateful.precondition(any_runs)
    @stateful.rule(place=PICK)
    def free(self, place: int) -> None:
        self.end(self.pick(place))

    @stateful.precondition(any_runs)
    @stateful.rule(place=PICK, seldom=st.integers(0, 3), frees=st.booleans())
    def discard(self, place: int, seldom: int, frees: bool) -> None:
        sequence = self.pick(place)
        if not seldom:
            self.cache.discard(sequence)
            if frees:
                self.end(sequence)

    @stateful.invariant()
    def books_are_right(self) -> None:
        self.events["step"] += 1
        self.cache.check()

    def teardown(self) -> None:
        self.cache.end()


def run_machine(num_steps: int) -> None:
    """At least so many steps, and in them everything that can happen."""
    events: Counter[str] = Counter()
    stateful.run_state_machine_as_test(  # type: ignore[no-untyped-call]
        partial(CacheMachine, events),
        settings=settings(
            max_examples=num_steps // 33,  # some runs end early
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(events))
    assert events["step"] >= num_steps
    assert events.keys() >= COMMON, f"never happened: {COMMON - events.keys()}"


def test_the_cache_and_the_model_agree_for_20_000_steps() -> None:
    run_machine(20_000)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_cache_and_the_model_agree_for_1_000_000_steps() -> None:
    run_machine(1_000_000)
