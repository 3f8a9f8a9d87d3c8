"""Tenants that share: who waits for whom, and for how long at most."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

import pytest

from nereid.request import RequestStatus
from nereid.scheduler import RequestState, Scheduler
from tests.unit.scheduler_steps import counts, first_scheduled, make_request, make_scheduler, run_step

SEATS, BUDGET = 8, 32


def steps_to_first_token(scheduler: Scheduler, state: RequestState, num_steps: int = 2000) -> int:
    """How many steps it takes from now until the request has a token."""
    for step in range(1, num_steps + 1):
        run_step(scheduler)
        if state.output_token_ids:
            return step
    raise AssertionError(f"no token within {num_steps} steps")


def bound(num_tenants: int, prompt_len: int, seats: int = SEATS, budget: int = BUDGET) -> int:
    """Steps to the first token of a tenant that had no request, whatever the others, at most `seats`, send.

    It may claim a seat at once, and up to its share of the blocks. It begins at the least count of those in line; so
    before its prompt is computed, each other gets at most as many tokens of prompts as it, and a step's budget that it
    had begun. A step has (budget - seats) tokens for prompts, as each seat but its own takes at most one otherwise.
    """
    tokens = num_tenants * prompt_len + (num_tenants - 1) * budget
    return -(-tokens // (budget - seats)) + num_tenants


def flooded(num_requests: int = 300, num_steps: int = 40, **settings: Any) -> Scheduler:
    """Tenant "flood" has all seats and a long queue of long prompts."""
    scheduler = make_scheduler(**{"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, **settings})
    rng = random.Random(1)
    for request_id in range(num_requests):
        prompt_len, max_tokens = rng.randint(20, 40), rng.randint(10, 24)
        scheduler.add(make_request(request_id, prompt_len, salt="flood", max_tokens=max_tokens))
    for _ in range(num_steps):
        run_step(scheduler)
    while scheduler.num_running < SEATS:
        run_step(scheduler)
    assert scheduler.num_waiting > 200
    return scheduler


@pytest.mark.parametrize("num_blocks", [200, 100], ids=["blocks to spare", "all blocks taken"])
@pytest.mark.parametrize("prompt_len", [1, 10, 40])
@pytest.mark.parametrize("num_steps", [20, 41, 63])
def test_a_flood_delays_anothers_first_token_by_a_bound(num_steps: int, prompt_len: int, num_blocks: int) -> None:
    scheduler = flooded(num_steps=num_steps, num_blocks=num_blocks)
    state = scheduler.add(make_request(1000, prompt_len, salt="other"))
    assert steps_to_first_token(scheduler, state) <= bound(2, prompt_len)


def test_without_tenants_the_same_request_waits_for_the_flood() -> None:
    scheduler = flooded()
    state = scheduler.add(make_request(1000, 40, salt="flood"))
    assert steps_to_first_token(scheduler, state) > 20 * bound(2, 40)


def test_many_tenants_each_get_a_first_token_within_the_bound() -> None:
    scheduler = flooded(num_blocks=200)
    states = [scheduler.add(make_request(1000 + n, 12, salt=f"tenant {n}")) for n in range(SEATS - 1)]
    limit = bound(SEATS, 12)
    for _ in range(limit):
        run_step(scheduler)
    assert all(state.output_token_ids for state in states)


def test_a_tenant_that_comes_again_and_again_stays_within_the_bound() -> None:
    scheduler = flooded(num_requests=500)
    for request_id in range(1000, 1012):
        state = scheduler.add(make_request(request_id, 20, salt="other", max_tokens=1))
        assert steps_to_first_token(scheduler, state) <= bound(2, 20)
        assert state.status is RequestStatus.FINISHED


def test_two_floods_get_equal_shares_of_the_computation() -> None:
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET)
    for request_id in range(100):
        scheduler.add(make_request(request_id, 40, salt="long", max_tokens=2))
    for request_id in range(100, 500):
        scheduler.add(make_request(request_id, 10, salt="short", max_tokens=2))
    served: Counter[str] = Counter()
    for _ in range(100):
        for request_id, tokens in counts(run_step(scheduler)[0]).items():
            served["long" if request_id < 100 else "short"] += tokens
    assert abs(served["long"] - served["short"]) <= 2 * BUDGET, served


def test_an_idle_tenant_saves_nothing_up() -> None:
    """One decodes a single stream while the other is served much; then it floods, and gets no more than its half."""
    scheduler = make_scheduler(num_blocks=4000, max_model_len=4000, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET)
    scheduler.add(make_request(0, 4, salt="quiet", max_tokens=2000, ignore_eos=True))
    ids = count(1)
    for _ in range(100):
        scheduler.add(make_request(next(ids), 20, salt="busy", max_tokens=3))
        run_step(scheduler)
    salts = {}
    for salt in ["quiet", "busy"] * 100:
        state = scheduler.add(make_request(next(ids), 40, salt=salt, max_tokens=1))
        salts[state.request_id] = salt
    served: Counter[str] = Counter()
    for _ in range(100):
        for request_id, tokens in counts(run_step(scheduler)[0]).items():
            served[salts.get(request_id, "before")] += tokens
    assert served["busy"] >= 0.8 * served["quiet"], served


def running_by_salt(scheduler: Scheduler) -> Counter[str]:
    return Counter(state.salt for state in scheduler.requests() if state.running)


def test_seats_do_not_go_to_and_fro() -> None:
    """They change hands once when another tenant comes, and not again while nobody comes."""
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET)
    for salt, first_id in (("flood", 0), ("other", 100)):
        for request_id in range(first_id, first_id + 2 * SEATS):
            scheduler.add(make_request(request_id, 4, salt=salt, max_tokens=16, ignore_eos=True))
        for _ in range(3):
            run_step(scheduler)
    assert running_by_salt(scheduler) == {"flood": SEATS // 2, "other": SEATS // 2}
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.num_preemptions == SEATS // 2


def test_blocks_do_not_go_to_and_fro() -> None:
    scheduler = make_scheduler(num_blocks=61, max_num_seqs=SEATS, max_num_batched_tokens=64)
    flood = [scheduler.add(make_request(n, 40, salt="flood")) for n in range(6)]  # ten blocks each
    for _ in range(4):
        run_step(scheduler)
    assert running_by_salt(scheduler) == {"flood": 5}
    other = [scheduler.add(make_request(100 + n, 25, salt="other")) for n in range(4)]  # seven each; four are its share
    for _ in range(2):
        run_step(scheduler)
    assert running_by_salt(scheduler) == {"flood": 2, "other": 4}
    assert all(state.running for state in other) and [state.running for state in flood] == [True, True] + [False] * 4
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.num_preemptions <= 7, "three claimed; the others for want of blocks as texts grew"


def test_a_claim_to_blocks_ends_at_the_tenants_share() -> None:
    scheduler = make_scheduler(num_blocks=61, max_model_len=200, max_num_seqs=SEATS, max_num_batched_tokens=256)
    for request_id in range(5):
        scheduler.add(make_request(request_id, 40, salt="flood", max_tokens=100))  # eleven blocks each
    run_step(scheduler)
    larger, smaller = (make_request(100 + n, 121 - n, salt="other") for n in range(2))  # 31 blocks, and 30: its share
    state = scheduler.add(larger)
    run_step(scheduler)
    assert not state.running and scheduler.num_preemptions == 0
    scheduler.finish(state)
    state = scheduler.add(smaller)
    run_step(scheduler)
    assert state.running and scheduler.num_preemptions > 0


def test_a_claim_frees_the_tokens_of_the_step_too() -> None:
    scheduler = make_scheduler(max_num_seqs=SEATS, max_num_batched_tokens=BUDGET)
    for request_id in range(SEATS):
        scheduler.add(make_request(request_id, 3, salt="flood"))
    run_step(scheduler)
    scheduler.add(make_request(1000, 40, salt="other"))
    plan = counts(run_step(scheduler)[0])
    assert plan == {**dict.fromkeys(range(SEATS - 1), 1), 1000: BUDGET - (SEATS - 1)}


def test_nobody_slips_past_one_who_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=61, max_model_len=240, max_num_seqs=SEATS, max_num_batched_tokens=256)
    scheduler.add(make_request(0, 190, salt="a"))  # 48 blocks, its tenant's last running request
    run_step(scheduler)
    waiting, behind = (scheduler.add(make_request(n, length, salt="bc"[n % 2])) for n, length in ((2, 80), (3, 4)))
    run_step(scheduler)
    assert not waiting.running and not behind.running
    assert first_scheduled(scheduler) == [2, 3]


def test_a_claim_out_of_order_leaves_the_spare_blocks_to_who_waits_for_them() -> None:
    scheduler = make_scheduler(num_blocks=61, max_model_len=240, max_num_seqs=SEATS, max_num_batched_tokens=256)
    for request_id in range(2):
        scheduler.add(make_request(request_id, 94, salt="a"))  # 24 blocks each; twelve are left
    run_step(scheduler)
    large = scheduler.add(make_request(2, 82, salt="b"))  # 21 blocks: one more than its share
    small = scheduler.add(make_request(3, 18, salt="c"))
    run_step(scheduler)
    assert (large.running, small.running, scheduler.num_preemptions) == (False, True, 1)
    run_step(scheduler)
    assert large.running and scheduler.num_preemptions == 1


def test_a_claim_leaves_the_front_and_the_best_ranked_alone() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=BUDGET)
    flood = [scheduler.add(make_request(n, 4, salt="flood", priority=-n)) for n in range(3)]
    run_step(scheduler)
    scheduler.add(make_request(10, 4, salt="other"))
    run_step(scheduler)
    assert [state.running for state in flood] == [False, True, True], "the worst-ranked gives way"


def test_no_tenant_is_pushed_out_by_more_tenants_than_seats() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=BUDGET)
    for request_id in range(40):
        scheduler.add(make_request(request_id, 6, salt=f"tenant {request_id}", max_tokens=5))
    assert first_scheduled(scheduler) == list(range(40))
    assert scheduler.num_preemptions == 0


def test_prompts_of_another_tenant_do_not_stall_streams() -> None:
    """Each stream gets its token in every step, whatever prompts come."""
    scheduler = make_scheduler(num_blocks=4000, max_model_len=2000, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET)
    for request_id in range(4):
        scheduler.add(make_request(request_id, 4, salt="streams", max_tokens=60, ignore_eos=True))
    run_step(scheduler)
    for request_id in range(4, 20):
        scheduler.add(make_request(request_id, 1500, salt="prompts", priority=-100))
    for _ in range(59):
        plan = counts(run_step(scheduler)[0])
        assert {request_id: plan[request_id] for request_id in range(4)} == dict.fromkeys(range(4), 1)
        assert sum(plan.values()) == BUDGET
