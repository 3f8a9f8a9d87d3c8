"""The table of metrics and the values that go into it: names, kinds and labels agree; counts are cumulative."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest

from nereid.batch import EngineStats
from nereid.errors import ErrorCode
from nereid.request import Branching, FinishReason, Request, RequestFailure, RequestOutput, RequestStats, SamplingParams
from nereid.sequences import sequences_of
from nereid.server.mailbox import Letter
from nereid.server.metric_table import Kind, metric_table
from nereid.server.metric_values import (
    LoadedEngine,
    Sample,
    empty_series,
    fixed_gauges,
    gauges,
    growth,
    observations,
    tally_growth,
)
from nereid.server.outcomes import Outcomes
from nereid.statistics import EngineStatistics, FinishedRequest, Tally
from tests.unit.scheduler_steps import make_request, make_scheduler, run_step

DEPLOYMENT = LoadedEngine(block_size=16, num_blocks=100, max_num_seqs=8, max_model_len=700, loaded_at=1e9)
TABLE = {spec.name: spec for spec in metric_table(700)}
WHOLE = RequestStats(1.0, 2.0, 4.0, 8.0, num_prompt_tokens=6, num_output_tokens=5, num_draft_tokens=4)


def series_of(kind: Kind) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series that the table has from the start."""
    specs = (spec for spec in TABLE.values() if spec.kind is kind)
    return {(s.name, s.labels) for spec in specs for labels in spec.labels for s in empty_series(spec, labels)}


def named(samples: list[Sample]) -> dict[str, float]:
    return {sample.name: sample.value for sample in samples}


def test_names_are_unique_and_well_formed() -> None:
    specs = metric_table(700)
    assert len(specs) == len(TABLE)
    assert all(spec.help and spec.help.isprintable() for spec in specs)
    for spec in specs:
        assert (spec.kind in (Kind.HISTOGRAM, Kind.TALLY)) == bool(spec.buckets), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name
        endings = ("_total", "_info", "_perc", "_seconds", "_metrics", "_running", "_waiting")
        assert spec.buckets or spec.name.endswith(endings), spec.name
    assert TABLE["vllm:request_prompt_tokens"].buckets == (1, 2, 5, 10, 20, 50, 100, 200, 500)


def test_each_gauge_gets_a_value() -> None:
    samples = [*gauges(EngineStats(3, 5, 25, 100, 7, 1.5), DEPLOYMENT), *fixed_gauges(DEPLOYMENT)]
    assert {(s.name, s.labels) for s in samples} >= series_of(Kind.GAUGE)
    assert {s.name for s in samples} == {spec.name for spec in TABLE.values() if spec.kind is Kind.GAUGE}
    by_type = {s.labels[0][1]: s.value for s in samples if s.name == "nv_trt_llm_kv_cache_block_metrics"}
    assert by_type == {"used": 25, "free": 75, "max": 100, "tokens_per": 16, "fraction": 0.25}
    by_type = {s.labels[0][1]: s.value for s in samples if s.name == "nv_trt_llm_request_metrics"}
    assert by_type == {"waiting": 5, "scheduled": 3, "active": 8, "max": 8}


def test_what_is_counted_by_sequence_is_called_so() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    sequences = sequences_of(replace(make_request(1, 4), branching=Branching(5, 5)), count(-1, -1), ())
    scheduler.add(sequences[0], sequences[1:])
    run_step(scheduler)
    stats = EngineStats(scheduler.num_running, scheduler.num_waiting, 0, 1, 0, 0.0)
    samples = [sample for sample in gauges(stats, DEPLOYMENT) if sample.value in (2, 3, 5)]
    assert {s.name for s in samples if "Sequences of requests" in TABLE[s.name].help} == {s.name for s in samples}
    assert len(samples) == 5, "two run and three wait: two gauges, and three of one by type"


def busy_statistics() -> EngineStatistics:
    statistics = EngineStatistics()
    statistics.advanced(RequestStats(0.0, num_prompt_tokens=6), 1, 1.0)
    statistics.advanced(WHOLE, 2, 8.5)
    statistics.stepped(8, 0.0, 0.1, 0.2, 0.3)
    statistics.drafted(2, 2)
    return statistics


def test_each_counter_and_tally_grows_by_its_own_series() -> None:
    outcomes = Outcomes()
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT):
        outcomes.sent(Letter((RequestOutput(1, finish_reason=reason, final=True),), final=True))
    for code in ErrorCode:
        outcomes.sent(Letter(failure=RequestFailure(code, "x"), final=True))
    samples = list(growth(busy_statistics().take(), outcomes.take()))
    series = [(s.name, s.labels) for s in samples]
    assert len(series) == len(set(series))
    preemptions = ("vllm:num_preemptions_total", ())  # comes with the gauges
    positions = {("vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", p),)) for p in "01"}
    assert set(series) | {preemptions} == series_of(Kind.COUNTER) | series_of(Kind.TALLY) | positions
    ends = {s.labels[0][1]: s.value for s in samples if s.name == "vllm:request_success_total"}
    assert ends == {"stop": 1, "length": 1, "timeout": 1, "abort": 1}
    assert named(samples)["vllm:generation_tokens_total"] == 3


def test_what_did_not_happen_adds_nothing() -> None:
    assert not any(sample.value for sample in growth(EngineStatistics().take(), Outcomes().take()))


def test_a_bucket_holds_those_before_it() -> None:
    samples = list(tally_growth("t", Tally((0.5, 1.0), (2, 0, 3), 7.5), (("part", "run"),)))
    values = [(s.name, dict(s.labels).get("le"), s.value) for s in samples]
    assert values == [
        ("t_bucket", "0.5", 2), ("t_bucket", "1", 2), ("t_bucket", "+Inf", 5), ("t_sum", None, 7.5),
        ("t_count", None, 5),
    ]  # fmt: skip
    assert all(dict(s.labels)["part"] == "run" for s in samples)


def test_a_whole_request_is_observed_in_every_histogram() -> None:
    values = named(list(observations(FinishedRequest(WHOLE, end_time=9.0, max_tokens=50))))
    assert set(values) == {spec.name for spec in TABLE.values() if spec.kind is Kind.HISTOGRAM}
    assert values["vllm:e2e_request_latency_seconds"] == 8.0
    assert values["vllm:time_to_first_token_seconds"] == 3.0
    assert values["vllm:time_per_output_token_seconds"] == 1.0
    assert values["vllm:request_queue_time_seconds"] == 1.0
    assert values["vllm:request_prefill_time_seconds"] == 2.0
    assert values["vllm:request_decode_time_seconds"] == 4.0
    assert values["vllm:request_inference_time_seconds"] == 6.0
    assert values["vllm:request_params_max_tokens"] == 50
    assert all(math.isfinite(value) for value in values.values())


@pytest.mark.parametrize("branching", [Branching(2, 4), Branching(2, 2, 4)])
def test_tokens_of_several_sequences_come_side_by_side(branching: Branching) -> None:
    """Four sequences of 3 tokens each, in as many steps."""
    stats = RequestStats(1.0, 2.0, 4.0, 8.0, num_prompt_tokens=6, num_output_tokens=12)
    values = named(list(observations(FinishedRequest(stats, 9.0, 50, branching))))
    assert values["vllm:request_params_n"] == 2 and values["vllm:request_generation_tokens"] == 12
    assert values["vllm:time_per_output_token_seconds"] == 2.0


@pytest.mark.parametrize(
    ("stats", "missing"),
    [
        (RequestStats(1.0), {"queue", "prefill", "decode", "inference", "first_token", "per_output"}),
        (RequestStats(1.0, 2.0), {"prefill", "decode", "inference", "first_token", "per_output"}),
        (RequestStats(1.0, 2.0, 3.0, 3.0, num_output_tokens=1), {"per_output"}),
    ],
)
def test_times_that_a_request_did_not_come_to_are_left_out(stats: RequestStats, missing: set[str]) -> None:
    names = set(named(list(observations(FinishedRequest(stats, 9.0, 50)))))
    for word in ("queue", "prefill", "decode", "inference", "first_token", "per_output"):
        assert any(word in name for name in names) == (word not in missing), word


def test_a_request_that_ends_by_its_client_is_no_answer() -> None:
    outcomes = Outcomes()
    outcomes.sent(Letter(failure=RequestFailure(ErrorCode.CANCELLED, "gone"), final=True))
    outcomes.merged()
    report = outcomes.take()
    assert report.finished == {} and report.failed == {ErrorCode.CANCELLED: 1} and report.num_merged == 1
    assert outcomes.take().failed == {}


def test_statistics_take_requests_as_they_are() -> None:
    statistics = EngineStatistics()
    statistics.finished(Request(1, (1,), SamplingParams(max_tokens=3), 1.0), WHOLE)
    (done,) = statistics.take().finished
    assert done.stats is WHOLE and done.max_tokens == 3
