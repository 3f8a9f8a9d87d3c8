"""What the engine reports -> values of the metrics in the table. Pure functions of plain data.

Samples of gauges are values to show, of counters and tallies what they grow by, of histograms values to observe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from nereid.batch import EngineStats
from nereid.errors import ErrorCode
from nereid.request import RequestStats
from nereid.server.metric_table import Kind, Labels, MetricSpec
from nereid.server.outcomes import OutcomeReport
from nereid.statistics import EngineReport, FinishedRequest, Tally


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What does not change while a model is loaded. block_size: tokens.  loaded_at: seconds since the epoch."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    loaded_at: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of one series."""

    name: str
    value: float
    labels: Labels = ()


def empty_series(spec: MetricSpec, labels: Labels) -> Iterator[Sample]:
    """The series of a family before its first value, for one set of its labels."""
    if spec.kind is Kind.TALLY:
        yield from tally_growth(spec.name, Tally(spec.buckets, (0,) * (len(spec.buckets) + 1), 0.0), labels)
    else:
        yield Sample(spec.name, 0.0, labels)


def fixed_gauges(loaded: LoadedEngine) -> Iterator[Sample]:
    """What is said once."""
    blocks = (("block_size", str(loaded.block_size)), ("num_gpu_blocks", str(loaded.num_blocks)))
    yield Sample("vllm:cache_config_info", 1.0, blocks)
    adapters = (("max_lora", "0"), ("running_lora_adapters", ""), ("waiting_lora_adapters", ""))
    yield Sample("vllm:lora_requests_info", loaded.loaded_at, adapters)


def gauges(stats: EngineStats, loaded: LoadedEngine) -> Iterator[Sample]:
    """The state of the engine now."""
    yield Sample("vllm:num_requests_running", stats.num_running)
    yield Sample("vllm:num_requests_waiting", stats.num_waiting)
    yield Sample("vllm:kv_cache_usage_perc", stats.kv_cache_usage)
    yield Sample("nereid:queue_age_seconds", stats.queue_age)
    requests = {
        "waiting": stats.num_waiting,
        "scheduled": stats.num_running,
        "active": stats.num_waiting + stats.num_running,
        "max": loaded.max_num_seqs,
    }
    for kind, count in requests.items():
        yield Sample("nv_trt_llm_request_metrics", count, (("request_type", kind),))
    blocks = {
        "used": stats.num_blocks_in_use,
        "free": stats.num_blocks - stats.num_blocks_in_use,
        "max": stats.num_blocks,
        "tokens_per": loaded.block_size,
        "fraction": stats.kv_cache_usage,
    }
    for kind, value in blocks.items():
        yield Sample("nv_trt_llm_kv_cache_block_metrics", value, (("kv_cache_block_type", kind),))


def growth(report: EngineReport, outcomes: OutcomeReport) -> Iterator[Sample]:
    """What counters and tallies grow by; much of it may be 0."""
    yield Sample("vllm:prompt_tokens_total", report.num_prompt_tokens)
    yield Sample("vllm:generation_tokens_total", report.num_generated_tokens)
    yield Sample("nereid:cached_tokens_total", report.num_cached_tokens)
    yield Sample("vllm:prefix_cache_queries_total", report.num_cache_queries)
    yield Sample("vllm:prefix_cache_hits_total", report.num_cache_hits)
    yield Sample("vllm:spec_decode_num_drafts_total", report.num_drafts)
    yield Sample("vllm:spec_decode_num_draft_tokens_total", report.num_draft_tokens)
    yield Sample("vllm:spec_decode_num_accepted_tokens_total", sum(report.accepted_by_position))
    for position, count in enumerate(report.accepted_by_position):
        yield Sample("vllm:spec_decode_num_accepted_tokens_per_pos_total", count, (("position", str(position)),))
    yield from _ends(outcomes)
    if any(report.token_gaps.counts):
        yield from tally_growth("vllm:inter_token_latency_seconds", report.token_gaps)
    if any(report.step_tokens.counts):
        yield from tally_growth("vllm:iteration_tokens_total", report.step_tokens)
        for part, tally in report.step_times.items():
            yield from tally_growth("nereid:step_time_seconds", tally, (("part", part),))


def _ends(outcomes: OutcomeReport) -> Iterator[Sample]:
    for reason, count in outcomes.finished.items():
        yield Sample("vllm:request_success_total", count, (("finished_reason", reason.value),))
    yield Sample(
        "vllm:request_success_total", outcomes.failed.get(ErrorCode.CANCELLED, 0), (("finished_reason", "abort"),)
    )
    for code, count in outcomes.failed.items():
        yield Sample("nereid:request_failures_total", count, (("code", code.name),))
    yield Sample("nereid:merged_responses_total", outcomes.num_merged)


def tally_growth(name: str, tally: Tally, labels: Labels = ()) -> Iterator[Sample]:
    """The series of a tally: a bucket counts the values of those before it too."""
    bounds = (*tally.bounds, math.inf)
    for bound, count in zip(bounds, accumulate(tally.counts), strict=True):
        yield Sample(f"{name}_bucket", count, (*labels, ("le", bound_text(bound))))
    yield Sample(f"{name}_sum", tally.total, labels)
    yield Sample(f"{name}_count", sum(tally.counts), labels)


def bound_text(bound: float) -> str:
    """As the server spells the bounds of its own histograms."""
    return "+Inf" if math.isinf(bound) else f"{bound:g}"


def observations(finished: FinishedRequest) -> Iterator[Sample]:
    """What a request that ended adds to the histograms: of times, those that it came to."""
    stats = finished.stats
    yield Sample("vllm:e2e_request_latency_seconds", finished.end_time - stats.arrival_time)
    yield Sample("vllm:request_prompt_tokens", stats.num_prompt_tokens)
    yield Sample("vllm:request_generation_tokens", stats.num_output_tokens)
    yield Sample("vllm:request_params_n", finished.branching.n)
    yield Sample("vllm:request_params_max_tokens", finished.max_tokens)
    if stats.first_scheduled_time is not None:
        yield Sample("vllm:request_queue_time_seconds", stats.first_scheduled_time - stats.arrival_time)
    yield from _token_times(stats, max(finished.branching.best_of, finished.branching.beam_width))
    if stats.num_draft_tokens:
        yield Sample("nereid:request_draft_acceptance", stats.num_accepted_tokens / stats.num_draft_tokens)


def _token_times(stats: RequestStats, num_at_once: int) -> Iterator[Sample]:
    """num_at_once: how many tokens a step may bring the request, one a sequence."""
    scheduled, first, last = stats.first_scheduled_time, stats.first_token_time, stats.last_token_time
    if scheduled is None or first is None or last is None:
        return
    yield Sample("vllm:time_to_first_token_seconds", first - stats.arrival_time)
    yield Sample("vllm:request_prefill_time_seconds", first - scheduled)
    yield Sample("vllm:request_decode_time_seconds", last - first)
    yield Sample("vllm:request_inference_time_seconds", last - scheduled)
    if stats.num_output_tokens > num_at_once:
        num_steps = stats.num_output_tokens / num_at_once
        yield Sample("vllm:time_per_output_token_seconds", (last - first) / (num_steps - 1))
