"""Priorities that age, shares of a full queue, and what a step costs while many wait."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest

from nereid.errors import QueueFullError
from nereid.request import RequestStatus
from tests.unit.scheduler_steps import first_scheduled, make_request, make_scheduler, run_step


def test_requests_start_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, priority in enumerate([0, 5, -1, 0, -100, 100, 5]):
        scheduler.add(make_request(request_id, 4, priority=priority, max_tokens=1))
    assert first_scheduled(scheduler) == [4, 2, 0, 3, 1, 6, 5]


def test_a_level_of_priority_is_worth_so_much_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1, priority_ageing_ms=2000)
    low = 0
    scheduler.add(make_request(low, 4, priority=3, at=100.0, max_tokens=1))  # as if it had come at 106
    for request_id, at in enumerate([105.9, 106.0, 106.1, 200.0], start=1):
        scheduler.add(make_request(request_id, 4, at=at, max_tokens=1))
    assert first_scheduled(scheduler) == [1, low, 2, 3, 4]


def test_without_ageing_priorities_mean_nothing() -> None:
    scheduler = make_scheduler(max_num_seqs=1, priority_ageing_ms=0)
    for request_id in range(4):
        scheduler.add(make_request(request_id, 4, priority=100 - request_id, max_tokens=1))
    assert first_scheduled(scheduler) == [0, 1, 2, 3]


@pytest.mark.parametrize("priority", [1, 100])
def test_constant_load_of_high_priority_starves_nobody(priority: int) -> None:
    """Two requests of high priority come in each step of 10 ms, of which one can run; one of low priority waits."""
    step_s, ageing_s = 0.01, 0.05
    scheduler = make_scheduler(max_num_seqs=1, priority_ageing_ms=int(ageing_s * 1e3))
    low = scheduler.add(make_request(0, 4, priority=priority, max_tokens=1))
    for step in range(10_000):
        at = step * step_s
        for request_id in (2 * step + 1, 2 * step + 2):
            scheduler.add(make_request(request_id, 4, at=at, max_tokens=1)) if scheduler.num_waiting < 500 else None
        run_step(scheduler) if step % 50 else scheduler.check_integrity()
        if low.status is RequestStatus.FINISHED:
            break
    came_before_it = 2 * (priority * ageing_s / step_s + 1)
    assert low.status is RequestStatus.FINISHED and step <= 1.1 * came_before_it + 1


def test_a_priority_moves_no_tenant_past_another() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(0, 4, salt="a", max_tokens=1))
    for request_id in range(1, 9):
        scheduler.add(make_request(request_id, 4, salt="ab"[request_id % 2], priority=-100 * (request_id % 2)))
    salts = ["ab"[request_id % 2] for request_id in first_scheduled(scheduler)]
    assert salts[1:] in (["b", "a"] * 4, ["a", "b"] * 4)


def test_extreme_priorities_keep_a_total_order() -> None:
    scheduler = make_scheduler(max_num_seqs=1, priority_ageing_ms=1 << 40)
    for request_id, priority in enumerate([100, -100, 100, 0, -100]):
        scheduler.add(make_request(request_id, 4, priority=priority, at=1e9, max_tokens=1))
    assert first_scheduled(scheduler) == [1, 4, 3, 0, 2]


def test_a_full_queue_refuses_the_tenant_that_fills_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_queue_size=10)
    run_step(scheduler)
    flood = [scheduler.add(make_request(n, 4, salt="flood", priority=n == 3)) for n in range(11)]
    with pytest.raises(QueueFullError, match="max_queue_size 10"):
        scheduler.add(make_request(100, 4, salt="flood"))
    displaced = []
    for request_id in range(200, 205):  # its half
        scheduler.add(make_request(request_id, 4, salt="other"))
        state = scheduler.displaced()
        assert state is not None
        scheduler.finish(state)
        displaced.append(state)
    assert displaced == [flood[3], *flood[:6:-1]], "the worst rank first, then the latest arrivals"
    with pytest.raises(QueueFullError):
        scheduler.add(make_request(300, 4, salt="other"))
    scheduler.check_integrity()


def test_nobody_who_ran_is_refused_for_another() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_queue_size=1)
    states = [scheduler.add(make_request(n, 4, salt="flood")) for n in range(3)]
    run_step(scheduler)
    for _ in range(3):
        scheduler.preempt_worst()
    assert scheduler.num_waiting == 3 and {state.status for state in states} == {RequestStatus.PREEMPTED}
    scheduler.add(make_request(10, 4, salt="flood"))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request(11, 4, salt="other"))


def calls_in_steps(num_waiting: int, num_tenants: int) -> int:
    """How many functions ten steps call, in which requests end and others start, while about `num_waiting` wait."""
    scheduler = make_scheduler(max_num_seqs=8, max_queue_size=num_waiting)
    for request_id in range(num_waiting):
        scheduler.add(make_request(request_id, 4, salt=str(request_id % num_tenants), max_tokens=1 + request_id % 3))
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        for _ in range(10):
            run_step(scheduler, check=False)
    finally:
        sys.setprofile(None)
    assert num_waiting - 100 < scheduler.num_waiting < num_waiting - 20
    return events["call"] + events["c_call"]


@pytest.mark.parametrize("num_tenants", [1, 7, 2000])
def test_a_step_costs_the_same_however_many_wait(num_tenants: int) -> None:
    few, many = (calls_in_steps(n, min(n, num_tenants)) for n in (200, 10_000))
    assert many <= 1.5 * few, (few, many)


def lookups_in_steps(num_blocks: int) -> int:
    """How often dictionaries are asked in ten steps, while one waits for room of whose blocks so many are found."""
    scheduler = make_scheduler(num_blocks=1001, max_model_len=4000, max_num_batched_tokens=4000)
    found = make_request(0, 4 * num_blocks, max_tokens=1)
    scheduler.add(found)
    run_step(scheduler)
    scheduler.add(make_request(1, 2000, max_tokens=100))
    state = scheduler.add(replace(make_request(2, 1), prompt_token_ids=(*found.prompt_token_ids, *range(9000, 12000))))
    run_step(scheduler)
    lookups = Counter[str]()
    sys.setprofile(lambda frame, event, argument: lookups.update([getattr(argument, "__name__", "")]))
    try:
        for _ in range(10):
            run_step(scheduler, check=False)
    finally:
        sys.setprofile(None)
    assert state.match and len(state.match.nodes) == num_blocks and not state.running
    return lookups["get"]


def test_what_is_found_of_who_waits_is_not_compared_again() -> None:
    few, many = lookups_in_steps(10), lookups_in_steps(200)
    assert 0 < many <= few + 10, (few, many)
