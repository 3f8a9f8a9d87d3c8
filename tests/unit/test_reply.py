"""Replies: every output from what the engine tells, as deltas and at the end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nereid.request import FinishReason, RequestOutput, RequestStats, TokenLogprobs
from nereid.server.fields import FIELDS
from nereid.server.reply import ReplyBuilder, ReplyOptions
from nereid.server.tensors import INPUTS, OUTPUTS, declared, output_ranks

POSITION = TokenLogprobs(7, -2.0, 3, ((4, -0.5), (5, -1.0)))
BEST = TokenLogprobs(4, -0.5, 1, ((4, -0.5), (5, float("-inf"))))
STATS = RequestStats(1.0, 1.5, 2.0, 2.5, 3, 4, num_cached_tokens=9, num_preemptions=1, num_draft_tokens=8,
                     num_accepted_tokens=2, num_new_blocks=5)  # fmt: skip
WANTED = frozenset(f.name.removeprefix("return_") for f in FIELDS if f.name.startswith("return_"))


def make(wanted: frozenset[str] = frozenset(), **options: Any) -> ReplyBuilder:
    return ReplyBuilder(ReplyOptions(wanted=wanted, **options), lambda i: f"<{i}>", block_size=4)


def entry(token_id: int, logprob: float, rank: int) -> tuple[str, dict[str, object]]:
    return str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": f"<{token_id}>"}


def test_nothing_but_the_text_comes_unasked() -> None:
    output = RequestOutput(1, "a", (7,), (POSITION,), finish_reason=FinishReason.STOP, stats=STATS)
    assert make(prefix="p ").build(output) == {"text_output": ["p a"]}


def test_a_stream_gets_deltas_and_sums() -> None:
    builder = make(WANTED, stream=True, prefix="p ", num_input_tokens=3, logprobs=True, prompt_logprobs=True)
    first = builder.build(RequestOutput(1, "a", (7,), (POSITION,), (BEST, POSITION)))
    last = builder.build(
        RequestOutput(1, "b", (4, 2), (BEST, BEST), finish_reason=FinishReason.STOP, stop_reason="é", stats=STATS),
        num_merged=6,
    )
    assert (first["text_output"], last["text_output"]) == (["p a"], ["b"])
    assert (first["finish_reason"], last["finish_reason"]) == (["None"], ["stop"])
    assert (first["stop_reason"], last["stop_reason"]) == (["null"], ['"é"'])
    assert (list(first["output_ids"]), list(last["output_ids"])) == ([7], [4, 2])
    assert (first["num_output_tokens"], last["num_output_tokens"]) == ([1], [2])
    assert (first["cumulative_logprob"], last["cumulative_logprob"]) == ([-2.0], [-3.0])
    assert (first["output_log_probs"], last["output_log_probs"]) == ([-2.0], [-0.5, -0.5])
    assert first["num_input_tokens"] == last["num_input_tokens"] == [3]
    (told,) = first["logprobs"]
    assert list(json.loads(str(told))[0].items()) == [entry(7, -2.0, 3), entry(4, -0.5, 1), entry(5, -1.0, 2)]
    (told,) = first["prompt_logprobs"]
    assert json.loads(str(told))[0] is None and len(json.loads(str(told))) == 3
    assert "prompt_logprobs" not in last and "num_cached_tokens" not in first


def test_times_and_counts_come_at_the_end() -> None:
    output = RequestOutput(1, "b", (), finish_reason=FinishReason.LENGTH, stats=STATS)
    reply = make(frozenset({"perf_metrics", "num_cached_tokens"})).build(output, num_merged=6)
    assert reply == {
        "text_output": ["b"],
        "num_cached_tokens": [9],
        "arrival_time_ns": [10**9],
        "first_scheduled_time_ns": [15 * 10**8],
        "first_token_time_ns": [2 * 10**9],
        "last_token_time_ns": [25 * 10**8],
        "num_preemptions": [1],
        "num_merged_responses": [6],
        "total_draft_tokens": [8],
        "total_accepted_draft_tokens": [2],
        "acceptance_rate": [0.25],
        "kv_cache_reused_blocks": [2],
        "kv_cache_alloc_new_blocks": [5],
        "kv_cache_alloc_total_blocks": [7],
    }


def test_logprobs_that_were_not_asked_for_are_null_and_infinity_is_a_number() -> None:
    output = RequestOutput(1, "a", (4,), (BEST,))
    wanted = frozenset({"logprobs", "prompt_logprobs"})
    assert make(wanted).build(output) == {"text_output": ["a"], "logprobs": ["null"], "prompt_logprobs": ["null"]}
    (told,) = make(wanted, logprobs=True).build(output)["logprobs"]
    assert list(json.loads(str(told))[0].items()) == [entry(4, -0.5, 1), entry(5, -9999.0, 2)]


def test_a_prompt_of_one_token_has_one_entry_which_is_null() -> None:
    builder = make(frozenset({"prompt_logprobs"}), num_input_tokens=1, prompt_logprobs=True)
    assert builder.build(RequestOutput(1, "a"))["prompt_logprobs"] == ["[null]"]
    assert "prompt_logprobs" not in builder.build(RequestOutput(1, "b"))


# Tensors


def test_every_output_has_its_switch_and_every_switch_an_output() -> None:
    outputs = {spec.name for spec in OUTPUTS}
    assert WANTED - {"perf_metrics", "log_probs", "context_logits", "generation_logits"} <= outputs
    output = RequestOutput(1, "a", (7,), (POSITION,), (BEST,), FinishReason.STOP, stats=STATS)
    assert set(make(WANTED, num_input_tokens=2, logprobs=True, prompt_logprobs=True).build(output)) == outputs


def test_numbers_are_tensors_only_where_there_is_a_leading_dimension() -> None:
    """The server takes no text for a number that is a tensor."""
    plain, batched = ({spec.name for spec in declared(INPUTS, batched=b)} for b in (False, True))
    assert {"max_tokens", "temperature", "ignore_eos", "seed", "beam_width", "streaming"} <= batched - plain
    assert {"text_input", "messages", "stream", "stop", "stop_words", "bad_words", "stop_token_ids"} <= plain
    vllm = {"text_input", "stream", "sampling_parameters", "exclude_input_in_output"} | {
        f"return_{name}"
        for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    }
    assert vllm <= plain
    assert len({spec.name for spec in INPUTS}) == len(INPUTS)


@pytest.mark.parametrize(("size", "expected"), [(0, [1, 1, 2]), (4, [1, 2, 3])])
def test_a_text_has_no_leading_dimension_as_tensorrt_llms_clients_expect(size: int, expected: list[int]) -> None:
    outputs = [spec.as_config(optional=False) for spec in OUTPUTS]
    ranks = output_ranks({"max_batch_size": size, "output": outputs})
    assert [ranks[name] for name in ("text_output", "output_ids", "output_log_probs")] == expected
