"""EngineStatistics: what is counted, once each, and that it stays small."""

from __future__ import annotations

import threading
import time

import pytest

from nereid.request import Request, RequestStats, SamplingParams
from nereid.statistics import STEP_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS, EngineReport, EngineStatistics


def request(request_id: int, arrival_time: float = 0.0) -> Request:
    return Request(request_id, (1, 2), SamplingParams(max_tokens=9), arrival_time)


def test_tokens_are_counted_with_the_step_that_brought_them() -> None:
    statistics = EngineStatistics()
    before_first = RequestStats(0.0, first_scheduled_time=1.0, num_prompt_tokens=7, num_cached_tokens=4)
    statistics.advanced(before_first, 1, 2.0)
    later = RequestStats(0.0, 1.0, 2.0, last_token_time=2.0, num_prompt_tokens=7, num_output_tokens=1)
    statistics.advanced(later, 3, 2.1875)
    report = statistics.take()
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.num_generated_tokens) == (7, 4, 4)
    assert report.token_gaps.counts.index(1) == TOKEN_GAP_BOUNDS.index(0.2)
    assert sum(report.token_gaps.counts) == 1 and report.token_gaps.total == 0.1875


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, 0), (2, 1), (8, 1), (9, 2), (16384, 12), (16385, 13)]
)  # fmt: skip
def test_a_bound_is_part_of_its_bucket(tokens: int, bucket: int) -> None:
    statistics = EngineStatistics()
    statistics.stepped(tokens, 0.0, 0.0, 0.0, 0.0)
    tally = statistics.take().step_tokens
    assert tally.bounds == STEP_TOKENS_BOUNDS and tally.counts.index(1) == bucket and tally.total == tokens


def test_a_steps_time_is_told_by_part() -> None:
    statistics = EngineStatistics()
    statistics.stepped(3, 1.0, 1.25, 2.0, 2.125)
    times = statistics.take().step_times
    assert {part: tally.total for part, tally in times.items()} == {"schedule": 0.25, "run": 0.75, "update": 0.125}


def test_drafts_and_cache_look_ups() -> None:
    statistics = EngineStatistics()
    for drafted, accepted in ((4, 2), (4, 0), (2, 2), (5, 5)):
        statistics.drafted(drafted, accepted)
    statistics.looked_up(100, 64)
    report = statistics.take()
    assert (report.num_drafts, report.num_draft_tokens) == (4, 15)
    assert report.accepted_by_position == (3, 3, 1, 1, 1)
    assert (report.num_cache_queries, report.num_cache_hits) == (100, 64)


def test_a_report_is_given_once() -> None:
    statistics = EngineStatistics()
    statistics.finished(request(1), RequestStats(0.0))
    statistics.stepped(3, 0.0, 0.1, 0.2, 0.3)
    assert [done.max_tokens for done in statistics.take().finished] == [9]
    empty = statistics.take()
    assert empty.finished == () and not any(empty.step_tokens.counts) and empty.step_tokens.total == 0


def test_queue_age_is_that_of_the_oldest_that_never_ran() -> None:
    statistics = EngineStatistics()
    assert statistics.queue_age == 0.0
    now = time.monotonic()
    for request_id, age in ((1, 30.0), (2, 20.0), (3, 10.0)):
        statistics.accepted(request(request_id, now - age))
    assert 30.0 <= statistics.queue_age < 31.0
    statistics.scheduled([1])
    assert 20.0 <= statistics.queue_age < 21.0
    statistics.finished(request(2), RequestStats(now))  # gave up waiting
    assert 10.0 <= statistics.queue_age < 11.0
    statistics.scheduled([3, 1])
    assert statistics.queue_age == 0.0


def test_it_stays_small_where_nobody_asks() -> None:
    statistics = EngineStatistics()
    for index in range(5000):
        statistics.accepted(request(index))
        statistics.finished(request(index), RequestStats(float(index)))
    finished = statistics.take().finished
    assert len(finished) == 2048 and finished[-1].stats.arrival_time == 4999.0


def test_nothing_is_lost_or_counted_twice_between_threads() -> None:
    statistics, reports = EngineStatistics(), list[EngineReport]()
    stats = RequestStats(0.0, 1.0, 2.0, last_token_time=2.0)

    def count() -> None:
        for _ in range(20_000):
            statistics.advanced(stats, 1, 2.5)

    counting = threading.Thread(target=count)
    counting.start()
    while counting.is_alive():
        reports.append(statistics.take())
    reports.append(statistics.take())
    assert sum(report.num_generated_tokens for report in reports) == 20_000
    assert sum(sum(report.token_gaps.counts) for report in reports) == 20_000
