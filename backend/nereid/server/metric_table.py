"""The table of metrics: every family on the server's metrics endpoint, with its kind, help, buckets and labels.

Pure data. Names of vLLM's and TensorRT-LLM's metrics are theirs, spelled as their endpoints spell them; so are labels'
values and, for vLLM's, buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from nereid.errors import ErrorCode
from nereid.statistics import STEP_PARTS, STEP_TIME_BOUNDS, STEP_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS

Labels = tuple[tuple[str, str], ...]

_NO_LABELS: tuple[Labels, ...] = ((),)
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_FIRST_TOKEN = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5)  # fmt: skip
_WHOLE_REQUEST = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Kind(Enum):
    """How a family gets its values.

    TALLY: a histogram whose values were counted by bucket before they come here. The server's own histograms take one
    value a call, too dear for what comes with every token; so each of its series (`_bucket`, `_sum`, `_count`) is a
    counter of that name. What is scraped reads the same, but for the comment that tells the type.
    """

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    TALLY = "tally"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One family. labels: the sets that are there from the start, beside the model's own; others come with their first
    value. buckets: upper bounds, of histograms and tallies."""

    name: str
    kind: Kind
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[Labels, ...] = _NO_LABELS


def metric_table(max_model_len: int) -> tuple[MetricSpec, ...]:
    """Every family. max_model_len: bounds the buckets of token counts."""
    return (*_GAUGES, *_COUNTERS, *_TALLIES, *_histograms(tuple(_one_two_five(max_model_len))))


def one_by_one(name: str, values: tuple[str, ...]) -> tuple[Labels, ...]:
    """A set of one label for each value."""
    return tuple(((name, value),) for value in values)


def _one_two_five(largest: int) -> Iterator[float]:
    """1, 2, 5, 10, 20, 50 ... up to `largest`, as vLLM does."""
    power = 1
    while power <= largest:
        yield from (float(power * factor) for factor in (1, 2, 5) if power * factor <= largest)
        power *= 10


FINISHED_REASONS = ("stop", "length", "timeout", "abort")
REQUEST_TYPES = ("waiting", "scheduled", "active", "max")
BLOCK_TYPES = ("used", "free", "max", "tokens_per", "fraction")

_GAUGES = (
    MetricSpec("vllm:num_requests_running", Kind.GAUGE, "Sequences of requests that take part in steps now."),
    MetricSpec(
        "vllm:num_requests_waiting",
        Kind.GAUGE,
        "Sequences of requests that wait to be scheduled, preempted ones included.",
    ),
    MetricSpec(
        "vllm:kv_cache_usage_perc", Kind.GAUGE, "Share of the KV blocks in use; 1 is all of them."
    ),
    MetricSpec(
        "vllm:cache_config_info", Kind.GAUGE, "1; block_size in tokens and num_gpu_blocks are labels.", labels=()
    ),
    MetricSpec(
        "vllm:lora_requests_info", Kind.GAUGE, "When the model was loaded (no adapters are served).", labels=()
    ),
    MetricSpec(
        "nv_trt_llm_request_metrics",
        Kind.GAUGE,
        "Sequences of requests now, by request_type; active is waiting and scheduled, max the most scheduled at once.",
        labels=one_by_one("request_type", REQUEST_TYPES),
    ),
    MetricSpec(
        "nv_trt_llm_kv_cache_block_metrics",
        Kind.GAUGE,
        "KV blocks, by kv_cache_block_type; tokens_per is the size of one, fraction the share in use.",
        labels=one_by_one("kv_cache_block_type", BLOCK_TYPES),
    ),
    MetricSpec(
        "nereid:queue_age_seconds", Kind.GAUGE, "How long the longest waiting request has waited for its first step."
    ),
)  # fmt: skip

_COUNTERS = (
    MetricSpec("vllm:prompt_tokens_total", Kind.COUNTER, "Tokens of prompts, counted at the first token."),
    MetricSpec("vllm:generation_tokens_total", Kind.COUNTER, "Tokens generated."),
    MetricSpec(
        "vllm:num_preemptions_total",
        Kind.COUNTER,
        "How often a request had to give its KV blocks up and be recomputed.",
    ),
    MetricSpec(
        "vllm:request_success_total",
        Kind.COUNTER,
        "Requests that were answered, by finished_reason; and those that were cancelled (abort).",
        labels=one_by_one("finished_reason", FINISHED_REASONS),
    ),
    MetricSpec("vllm:prefix_cache_queries_total", Kind.COUNTER, "Prompt tokens looked up in the prefix cache."),
    MetricSpec("vllm:prefix_cache_hits_total", Kind.COUNTER, "Prompt tokens found in the prefix cache."),
    MetricSpec("vllm:spec_decode_num_drafts_total", Kind.COUNTER, "Drafts verified."),
    MetricSpec("vllm:spec_decode_num_draft_tokens_total", Kind.COUNTER, "Tokens of drafts verified."),
    MetricSpec("vllm:spec_decode_num_accepted_tokens_total", Kind.COUNTER, "Tokens of drafts accepted."),
    MetricSpec(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        Kind.COUNTER,
        "Tokens of drafts accepted, by their position in the draft.",
        labels=(),
    ),
    MetricSpec(
        "nereid:request_failures_total",
        Kind.COUNTER,
        "Requests that ended with an error, by its code; refused ones too.",
        labels=one_by_one("code", tuple(code.name for code in ErrorCode)),
    ),
    MetricSpec(
        "nereid:merged_responses_total",
        Kind.COUNTER,
        "Responses of streams that were merged with the one before, since the client took them too slowly.",
    ),
    MetricSpec("nereid:cached_tokens_total", Kind.COUNTER, "Tokens of prompts that did not have to be computed."),
)

_TALLIES = (
    MetricSpec(
        "vllm:inter_token_latency_seconds",
        Kind.TALLY,
        "Time between two steps that brought a request tokens.",
        TOKEN_GAP_BOUNDS,
    ),
    MetricSpec("vllm:iteration_tokens_total", Kind.TALLY, "Tokens scheduled in a step.", STEP_TOKENS_BOUNDS),
    MetricSpec(
        "nereid:step_time_seconds",
        Kind.TALLY,
        "Time of a step, by part: schedule, run (the model and the sampler), update.",
        STEP_TIME_BOUNDS,
        one_by_one("part", STEP_PARTS),
    ),
)


def _histograms(token_counts: tuple[float, ...]) -> tuple[MetricSpec, ...]:
    """One value a request, observed at its end."""
    rows = (
        ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN),
        ("vllm:time_per_output_token_seconds", "Mean time of a token after the first.", _PER_TOKEN),
        ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", _WHOLE_REQUEST),
        ("vllm:request_queue_time_seconds", "From a request's arrival to its first step.", _SECONDS),
        ("vllm:request_prefill_time_seconds", "From a request's first step to its first token.", _SECONDS),
        ("vllm:request_decode_time_seconds", "From a request's first token to its last.", _SECONDS),
        ("vllm:request_inference_time_seconds", "From a request's first step to its last token.", _SECONDS),
        ("vllm:request_prompt_tokens", "Tokens of a prompt.", token_counts),
        ("vllm:request_generation_tokens", "Tokens generated for a request.", token_counts),
        ("vllm:request_params_n", "Sequences that a request asks for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
        ("vllm:request_params_max_tokens", "max_tokens of a request.", token_counts),
        ("nereid:request_draft_acceptance", "Accepted share of the tokens drafted for a request.", _SHARES),
    )
    return tuple(MetricSpec(name, Kind.HISTOGRAM, text, buckets) for name, text, buckets in rows)
