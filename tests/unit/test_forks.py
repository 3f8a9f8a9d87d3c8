"""Requests of several sequences in the scheduler: what they share, when they start, and how they count."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from nereid.batch import SchedulerOutput
from nereid.config import EngineConfig
from nereid.errors import QueueFullError
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import Branching, Request
from nereid.scheduler import RequestState, Scheduler
from nereid.scheduling.step_plan import StepPlan
from nereid.sequences import sequences_of
from tests.unit.scheduler_steps import EOS, counts, make_request, make_scheduler, run_step

SIBLING_IDS = itertools.count(-1, -1)


def add(scheduler: Scheduler, request: Request, n: int) -> list[RequestState]:
    own, *others = sequences_of(replace(request, branching=Branching(n, n)), SIBLING_IDS, (EOS,))
    leader = scheduler.add(own, others)
    return [leader, *leader.siblings]


def forks(plan: SchedulerOutput) -> dict[int, int]:
    """Whose logits a sequence's first token is drawn from, by its id."""
    return {row.request_id: row.forked_from for row in plan.scheduled if row.forked_from is not None}


def running(states: list[RequestState]) -> list[bool]:
    return [state.running for state in states]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("budget", [512, 520, 100])
def test_eight_sequences_take_the_fewest_blocks_that_hold_them(cache: bool, budget: int) -> None:
    """520 tokens fill 32 blocks of 16, which all share. Each sequence has its own copy of the 33rd, half full, and two
    blocks for what follows: its last token, the 552nd, is drawn and never computed. So many the pool has."""
    kv_cache = KVCacheManager(1 + 32 + 8 * 3, BlockLayout(16))
    config = EngineConfig(model="x", max_num_batched_tokens=budget)
    scheduler = Scheduler(config, kv_cache, 552, (EOS,))
    states = add(scheduler, replace(make_request(1, 520, max_tokens=32), cache=cache), 8)
    peak = num_computed = 0
    while scheduler.has_work:
        # Each sequence draws tokens of its own: else they would share what follows, too.
        plan, _ = run_step(scheduler, draw=lambda request_id: 100 - request_id)
        num_computed += plan.num_scheduled_tokens
        peak = max(peak, kv_cache.num_blocks - kv_cache.num_free_blocks)
    assert scheduler.num_preemptions == 0 and num_computed == 520 + 8 * 31
    assert peak == 32 + 8 * 3 == 56
    # A block that a sequence takes is counted for it alone: the leader's 33 and what follows, and the others' three.
    assert sum(state.num_new_blocks for state in states) == 56


def test_the_last_block_is_copied_at_the_first_write_and_the_last_owner_keeps_it() -> None:
    scheduler = make_scheduler()
    states = add(scheduler, make_request(1, 6), 3)
    plan, _ = run_step(scheduler)
    assert forks(plan) == {state.request_id: 1 for state in states[1:]} and plan.kv_ops == ()
    tables = scheduler._kv_cache.tables
    shared = tables[1][0][1]
    assert all(tables[state.request_id] == tables[1] for state in states)
    plan, _ = run_step(scheduler)
    assert [getattr(op, "source", None) for op in plan.kv_ops] == [shared, shared]
    tables = scheduler._kv_cache.tables
    last = [tables[state.request_id][0][1] for state in states]
    assert len(set(last)) == 3 and last[-1] == shared
    assert len({tables[state.request_id][0][0] for state in states}) == 1
    assert all(run_step(scheduler)[0].kv_ops == () for _ in range(3))


def test_a_prompt_that_fills_its_blocks_is_copied_nowhere() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(1, 8), 3)
    assert all(run_step(scheduler)[0].kv_ops == () for _ in range(4))


def test_forks_start_where_the_prompt_has_used_the_budget_up() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    states = add(scheduler, make_request(1, 16), 3)
    assert counts(run_step(scheduler)[0]) == {1: 8}
    assert counts(run_step(scheduler)[0]) == {1: 8, states[1].request_id: 0, states[2].request_id: 0}
    assert counts(run_step(scheduler)[0]) == {state.request_id: 1 for state in states}


def test_who_finds_no_seat_starts_later_behind_the_shared_prefix() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    states = add(scheduler, make_request(1, 10, max_tokens=3), 4)
    run_step(scheduler)
    assert running(states) == [True, True, False, False]
    run_step(scheduler)
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert counts(plan) == {state.request_id: 1 for state in states[2:]}  # of ten tokens, nine are found
    assert forks(plan) == {}


def test_siblings_keep_their_place_behind_their_leader() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=8)
    states = add(scheduler, make_request(1, 12), 3)
    scheduler.add(make_request(2, 3))
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert running(states) == [True, True, True] and 2 not in counts(plan)


def test_siblings_do_not_hold_another_tenant_up() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    states = add(scheduler, make_request(1, 20), 4)
    run_step(scheduler)
    scheduler.add(make_request(2, 3, salt="b", at=1.0))
    assert 2 in counts(run_step(scheduler)[0])
    while not states[1].running:
        run_step(scheduler)
    # Both tenants have a share of two seats; one of the first's three siblings finds the seat that is left over.
    assert running(states) == [True, True, True, False]


def test_forks_of_a_plan_go_with_their_leader() -> None:
    scheduler = make_scheduler()
    seats, plan = scheduler._seats, StepPlan(20, None)
    leader, *others = states = add(scheduler, make_request(1, 8), 3)
    assert seats.start(leader, seats.match(leader), plan)
    scheduler._give(leader, 8, plan)
    assert plan.forkable == {leader} and all(seats.fork(leader, other, plan) for other in others)
    seats._preempt(leader, plan)
    assert running(states) == [False] * 3 and plan.budget == 20 and not plan.forkable
    assert plan.close(1, (), scheduler._kv_cache).scheduled == ()
    scheduler.check_integrity()
    assert len(forks(run_step(scheduler)[0])) == 2


def test_a_request_counts_once_in_the_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_queue_size=2)
    scheduler.add(make_request(1, 4, max_tokens=30))
    run_step(scheduler)
    states = add(scheduler, make_request(2, 4), 8)
    scheduler.add(make_request(3, 4))
    assert scheduler.num_waiting == 9
    with pytest.raises(QueueFullError, match="max_queue_size 2"):
        add(scheduler, make_request(4, 4), 2)
    scheduler.end(states[0])
    assert scheduler.num_waiting == 1 and scheduler.displaced() is None
    scheduler.check_integrity()


def test_a_request_is_displaced_with_all_its_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_queue_size=2)
    scheduler.add(make_request(1, 4, salt="a"))
    run_step(scheduler)
    scheduler.add(make_request(2, 4, salt="a"))
    states = add(scheduler, make_request(3, 4, salt="a"), 4)
    scheduler.add(make_request(4, 4, salt="b"))
    assert scheduler.displaced() is states[0]
    scheduler.end(states[0])
    scheduler.check_integrity()
    assert scheduler.displaced() is None and scheduler.num_waiting == 2


def test_an_idle_scheduler_takes_more_sequences_than_it_has_seats_and_places() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_queue_size=1)
    states = add(scheduler, make_request(1, 5, max_tokens=2), 9)
    for _ in range(40):
        run_step(scheduler)
    assert not scheduler.has_work and all(len(state.output_token_ids) == 2 for state in states)


def test_the_front_may_be_a_sequence_whose_leader_has_ended() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    states = add(scheduler, make_request(1, 5, max_tokens=2), 3)
    run_step(scheduler)
    scheduler.finish(states[0])
    scheduler.finish(states[1])
    plan, _ = run_step(scheduler)
    assert counts(plan) == {states[2].request_id: 1 if states[2].num_cached_tokens == 4 else 5}
