"""Who waits for what another computes, or for the disk, and who starts meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import replace

from nereid.batch import BlockKey, LoadBlock, StoreBlock
from nereid.config import EngineConfig
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import Branching, Request
from nereid.scheduler import RequestState, Scheduler
from nereid.scheduling.prompt_line import _MOST_PASSED_OVER
from nereid.sequences import sequences_of
from tests.unit.scheduler_steps import EOS, counts, first_scheduled, make_request, make_scheduler, run_step

SHARED = tuple(range(5000, 5008))


def sharing(request_id: int, prompt_len: int = 4) -> Request:
    """A request whose prompt begins with two blocks that all of these share."""
    request = make_request(request_id, prompt_len, max_tokens=2)
    return replace(request, prompt_token_ids=SHARED + request.prompt_token_ids)


def add_three_sequences(scheduler: Scheduler, request: Request) -> list[RequestState]:
    """A request of three, the others under the ids -1 and -2."""
    own, *others = sequences_of(replace(request, branching=Branching(3, 3)), itertools.count(-1, -1), (EOS,))
    leader = scheduler.add(own, others)
    return [leader, *leader.siblings]


def running(states: list[RequestState]) -> list[bool]:
    return [state.running for state in states]


def test_who_awaits_a_block_holds_nobody_else_back() -> None:
    scheduler = make_scheduler()
    states = [scheduler.add(request) for request in (sharing(1), sharing(2), make_request(3, 5), sharing(4))]
    assert counts(run_step(scheduler)[0]) == {1: 12, 3: 5}
    assert scheduler.num_waiting == 2
    assert counts(run_step(scheduler)[0]) == {1: 1, 3: 1, 2: 4, 4: 4}
    assert [state.num_cached_tokens for state in states] == [0, 8, 0, 8]


def test_who_was_passed_over_is_first_in_the_next_step() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for request in (sharing(1), sharing(2), *(make_request(n, 5, max_tokens=1) for n in range(3, 8))):
        scheduler.add(request)
    assert first_scheduled(scheduler) == [1, 3, 4, 2, 5, 6, 7]


def test_who_lacks_room_holds_those_behind_it_back_even_so() -> None:
    scheduler = make_scheduler(num_blocks=11)  # ten blocks of four
    states = [scheduler.add(request) for request in (sharing(1), sharing(2), make_request(3, 33), make_request(4, 4))]
    run_step(scheduler)
    assert running(states) == [True, False, False, False]


def test_all_sequences_of_a_request_wait_with_their_leader() -> None:
    scheduler = make_scheduler()
    scheduler.add(sharing(1))
    states = [*add_three_sequences(scheduler, sharing(2)), scheduler.add(make_request(3, 5))]
    run_step(scheduler)
    assert running(states) == [False] * 3 + [True]
    assert counts(run_step(scheduler)[0]) == {1: 1, 3: 1, 2: 4, -1: 0, -2: 0}


def test_the_seats_of_a_request_that_runs_are_kept_for_its_sequences() -> None:
    scheduler = make_scheduler(max_model_len=400, max_num_seqs=3, max_num_batched_tokens=256)
    told = make_request(1, 100, prompt_logprobs=0)  # in two chunks, which leave tokens of the budget over
    states = [*add_three_sequences(scheduler, told), scheduler.add(make_request(2, 5))]
    run_step(scheduler)
    assert running(states) == [True, False, False, False]
    run_step(scheduler)
    assert running(states) == [True, True, True, False]


def test_a_step_looks_at_a_bounded_number_of_those_who_wait() -> None:
    scheduler = make_scheduler(num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=64)
    seats, looked_at = scheduler._seats, []
    match = seats.match
    seats.match = lambda state: looked_at.append(state) or match(state)  # type: ignore[method-assign, func-returns-value]
    for request_id in range(_MOST_PASSED_OVER + 20):
        scheduler.add(sharing(request_id))
    last = scheduler.add(make_request(100, 4))
    run_step(scheduler)
    assert len(looked_at) <= _MOST_PASSED_OVER + 3 and not last.running
    assert len(first_scheduled(scheduler)) == _MOST_PASSED_OVER + 20


def on_disk(prompt: tuple[int, ...]) -> list[BlockKey]:
    """The names of a prompt's full blocks."""
    scheduler = Scheduler(*scheduler_with(()), 64, (EOS,))
    scheduler.add(replace(make_request(1, 4, max_tokens=1), prompt_token_ids=prompt))
    run_step(scheduler)
    return [op.key for op in scheduler._kv_cache.store_all() if isinstance(op, StoreBlock)]


def scheduler_with(names: tuple[str, ...], num_blocks: int = 11) -> tuple[EngineConfig, KVCacheManager]:
    config = EngineConfig.from_mapping({"model": "x", "block_size": 4})
    return config, KVCacheManager(num_blocks, BlockLayout(4), disk=DiskIndex("fingerprint", names))


def test_nobody_takes_the_blocks_that_are_read_for_another() -> None:
    prompt = tuple(range(5000, 5017))  # four full blocks
    scheduler = Scheduler(*scheduler_with(tuple(key.name for key in on_disk(prompt))), 64, (EOS,))
    for request_id in range(2):  # the second one asks what is to spare
        scheduler.add(make_request(request_id, 4))
    reading = scheduler.add(replace(make_request(2, 4), prompt_token_ids=prompt))
    behind = scheduler.add(make_request(3, 20))
    plan, _ = run_step(scheduler)
    assert [type(op) for op in plan.kv_ops] == [LoadBlock] * 4 and not behind.running
    run_step(scheduler)
    assert reading.num_cached_tokens == 16
