"""The scheduler by itself: budget, order, admission, preemption, limits."""

from __future__ import annotations

from typing import Any

import pytest

from nereid.errors import InvalidRequestError, QueueFullError
from nereid.request import FinishReason, RequestStatus
from tests.unit.scheduler_steps import EOS, counts, make_request, make_scheduler, run_step


def test_a_long_prompt_is_chunked_and_decodes_go_along() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request(1, 3))
    scheduler.add(make_request(2, 20))
    assert [counts(run_step(scheduler)[0]) for _ in range(4)] == [
        {1: 3, 2: 5},
        {1: 1, 2: 7},
        {1: 1, 2: 7},
        {1: 1, 2: 1},
    ]


def test_a_prompt_whose_logprobs_are_told_goes_in_small_chunks() -> None:
    scheduler = make_scheduler(max_model_len=400, max_num_batched_tokens=256)
    scheduler.add(make_request(1, 200, prompt_logprobs=0))
    scheduler.add(make_request(2, 150))
    plans = [counts(run_step(scheduler)[0]) for _ in range(4)]
    assert [plan.get(1) for plan in plans] == [64, 64, 64, 8]
    assert plans[0][2] == 150


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request(1, 17))
    assert [run_step(scheduler)[0].scheduled[0].samples for _ in range(4)] == [False, False, True, True]


def test_the_executor_hears_of_a_prompt_once_and_of_its_end_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 5, max_tokens=2))
    plans = [run_step(scheduler)[0] for _ in range(3)]
    assert [len(plan.new_requests) for plan in plans] == [1, 0, 0]
    assert [plan.finished_ids for plan in plans] == [(), (), (1,)]
    assert not scheduler.has_work


def test_waiting_requests_start_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in (5, 3, 4):
        scheduler.add(make_request(request_id, 4, max_tokens=1))
    assert list(counts(run_step(scheduler)[0])) == [5, 3]
    assert list(counts(run_step(scheduler)[0])) == [4]


def test_a_prompt_in_chunks_keeps_the_blocks_that_it_will_need() -> None:
    scheduler = make_scheduler(num_blocks=11, max_num_batched_tokens=8)  # ten blocks of four
    scheduler.add(make_request(1, 30, max_tokens=1))
    scheduler.add(make_request(2, 16, max_tokens=1))
    plans = [run_step(scheduler)[0] for _ in range(6)]
    assert [list(counts(plan)) for plan in plans] == [[1], [1], [1], [1], [2], [2]]
    assert scheduler.num_preemptions == 0


def test_the_latest_arrival_is_preempted_and_comes_back_whole() -> None:
    scheduler = make_scheduler(num_blocks=5)  # four blocks of four
    first, second = scheduler.add(make_request(1, 8)), scheduler.add(make_request(2, 7))
    run_step(scheduler)
    assert scheduler.num_running == 2
    run_step(scheduler)
    assert first.status is RequestStatus.RUNNING and second.status is RequestStatus.PREEMPTED
    assert second.output_token_ids == [9] and scheduler.num_preemptions == 1
    while first.status is RequestStatus.RUNNING:
        run_step(scheduler)
    plan, _ = run_step(scheduler)
    (row,) = plan.scheduled
    assert (row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) == (2, 0, 8)
    assert row.first_new_blocks == (0,), "its block table begins anew"
    assert plan.new_requests == ()


@pytest.mark.parametrize("victim_step", range(12))
def test_every_admitted_request_finishes_whatever_is_preempted(victim_step: int) -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=6)
    for request_id in range(5):
        scheduler.add(make_request(request_id, 5 + request_id, max_tokens=8))
    drawn = dict.fromkeys(range(5), 0)
    for step in range(400):
        if step == victim_step and scheduler.num_running:
            scheduler.preempt_worst()
        for advance in run_step(scheduler)[1]:
            drawn[advance.state.request_id] += 1
        if not scheduler.has_work:
            break
    assert drawn == dict.fromkeys(range(5), 8)


def test_the_queue_limit_counts_what_cannot_start_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_queue_size=2)
    for request_id in range(5):
        scheduler.add(make_request(request_id, 4))
    with pytest.raises(QueueFullError, match="max_queue_size 2"):
        scheduler.add(make_request(5, 4))
    run_step(scheduler)
    with pytest.raises(QueueFullError):
        scheduler.add(make_request(6, 4))
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)


@pytest.mark.parametrize("prompt_len", [63, 64, 65, 10_000])
def test_a_prompt_without_room_is_refused_at_once(prompt_len: int) -> None:
    scheduler = make_scheduler(max_model_len=64)
    if prompt_len < 64:
        assert scheduler.add(make_request(1, prompt_len, max_tokens=2)).max_tokens == 1
        return
    with pytest.raises(InvalidRequestError, match=f"{prompt_len} tokens; allowed: at most 63 tokens"):
        scheduler.add(make_request(1, prompt_len))
    assert not scheduler.has_work


def test_a_huge_max_tokens_is_cut_to_the_room_left() -> None:
    assert make_scheduler(max_model_len=64).add(make_request(1, 10, max_tokens=10**18)).max_tokens == 54


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "length"),
    [
        ({}, [EOS], FinishReason.STOP, 1),
        ({"ignore_eos": True}, [EOS] * 8, FinishReason.LENGTH, 8),
        ({"stop_token_ids": (77,), "ignore_eos": True}, [5, EOS, 77], FinishReason.STOP, 3),
        ({"max_tokens": 2}, [5, EOS], FinishReason.STOP, 2),
        ({"max_tokens": 2}, [5, 6], FinishReason.LENGTH, 2),
        ({"min_tokens": 5}, [EOS] * 6, FinishReason.STOP, 6),
        ({"min_tokens": 5, "max_tokens": 5}, [5] * 5, FinishReason.LENGTH, 5),
    ],
)
def test_why_and_where_a_request_ends(
    sampling: dict[str, Any], tokens: list[int], reason: FinishReason, length: int
) -> None:
    scheduler = make_scheduler()
    state = scheduler.add(make_request(1, 4, **sampling))
    reasons = [run_step(scheduler, token)[1][0].finish_reason for token in tokens]
    assert reasons == [None] * (length - 1) + [reason]
    assert state.output_token_ids == tokens[:length] and state.status is RequestStatus.FINISHED
