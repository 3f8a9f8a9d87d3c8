"""Long prompts beside streams: chunks follow the time that steps were measured to take."""

from __future__ import annotations

from nereid.scheduling.pacing import Pacing
from tests.unit.scheduler_steps import counts, make_request, make_scheduler, run_step

BASE_S, TOKEN_S = 0.010, 0.0005  # of a step, and of each prompt token; twice that behind 4,000 tokens


def run_beside_streams(target_itl_ms: int | None, prompt_len: int = 6000) -> tuple[list[float], float]:
    """Gaps of the streams while a long prompt is computed, and its time to the first token."""
    settings = {} if target_itl_ms is None else {"target_itl_ms": target_itl_ms}
    scheduler = make_scheduler(4000, 8000, max_num_batched_tokens=2048, **settings)
    for request_id in range(1, 9):
        scheduler.add(make_request(request_id, 5, max_tokens=2000))

    def step() -> float:
        plan, _ = run_step(scheduler, check=False)
        prompts = [row for row in plan.scheduled if row.num_scheduled_tokens > 1]
        seconds = BASE_S + sum(
            row.num_scheduled_tokens * TOKEN_S * (1 + row.num_computed_tokens / 4000) for row in prompts
        )
        scheduler.took(plan, seconds)
        return seconds

    for _ in range(20):
        step()
    long = scheduler.add(make_request(9, prompt_len, max_tokens=2))
    gaps = []
    while not long.output_token_ids:
        gaps.append(step())
    return gaps, sum(gaps)


def test_gaps_stay_near_the_target_and_the_prompt_gets_on() -> None:
    gaps, ttft = run_beside_streams(50)
    _, alone = run_beside_streams(None)
    assert sorted(gaps)[len(gaps) * 99 // 100] < 0.060 and max(gaps) < 0.100
    assert ttft < 3 * alone
    whole, _ = run_beside_streams(None)
    assert max(whole) > 1.0, "without a target the streams wait for a whole chunk"


def test_a_target_that_cannot_be_met_does_not_stop_a_prompt() -> None:
    gaps, _ = run_beside_streams(1, prompt_len=600)
    assert len(gaps) < 600 / 8


def test_without_streams_a_step_has_its_whole_budget() -> None:
    scheduler = make_scheduler(1000, 3000, max_num_batched_tokens=512, target_itl_ms=1)
    scheduler.add(make_request(1, 2000))
    assert counts(run_step(scheduler)[0]) == {1: 512}


def test_steps_are_followed_as_they_become_slower() -> None:
    pacing = Pacing(0.1)
    assert pacing.most_prompt_tokens(4096) == 64
    for _ in range(30):
        pacing.took(0, 8, 0.02)
        pacing.took(100, 8, 0.02 + 100 * 0.001)
    assert pacing.most_prompt_tokens(4096) == 80 and pacing.most_prompt_tokens(10) == 10
    for _ in range(30):
        pacing.took(100, 8, 0.02 + 100 * 0.002)
    assert 40 <= pacing.most_prompt_tokens(4096) < 45
    assert Pacing(None).most_prompt_tokens(4096) == 4096
