"""Replies: every output from what the engine tells, as deltas and at the end."""

from __future__ import annotations

import json
from typing import Any

from nereid.request import FinishReason, RequestOutput, RequestStats, TokenLogprobs
from nereid.server.fields import FIELDS
from nereid.server.reply import Reply, ReplyBuilder, ReplyOptions, Rows
from nereid.server.tensors import INPUTS, OUTPUTS, declared

POSITION = TokenLogprobs(7, -2.0, 3, ((4, -0.5), (5, -1.0)))
BEST = TokenLogprobs(4, -0.5, 1, ((4, -0.5), (5, float("-inf"))))
STATS = RequestStats(1.0, 1.5, 2.0, 2.5, 3, 4, num_cached_tokens=9, num_preemptions=1, num_draft_tokens=8,
                     num_accepted_tokens=2, num_new_blocks=5)  # fmt: skip
WANTED = frozenset(f.name.removeprefix("return_") for f in FIELDS if f.name.startswith("return_"))


def make(wanted: frozenset[str] = frozenset(), **options: Any) -> ReplyBuilder:
    return ReplyBuilder(ReplyOptions(wanted=wanted, **options), lambda i: f"<{i}>", block_size=4)


def build(builder: ReplyBuilder, *outputs: RequestOutput, num_merged: int = 0) -> Reply:
    return builder.build(outputs, num_merged=num_merged)


def told(reply: Reply, name: str) -> Any:
    """The JSON in an output's one element."""
    values = reply[name]
    assert not isinstance(values, Rows)
    (text,) = values
    return json.loads(str(text))


def entry(token_id: int, logprob: float, rank: int) -> tuple[str, dict[str, object]]:
    return str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": f"<{token_id}>"}


def test_nothing_but_the_text_comes_unasked() -> None:
    output = RequestOutput(1, "a", (7,), (POSITION,), finish_reason=FinishReason.STOP, stats=STATS)
    assert build(make(prefix="p "), output) == {"text_output": ["p a"]}


def test_a_stream_gets_deltas_and_sums() -> None:
    builder = make(WANTED, stream=True, prefix="p ", num_input_tokens=3, logprobs=True, prompt_logprobs=True)
    first = build(builder, RequestOutput(1, "a", (7,), (POSITION,), (BEST, POSITION)))
    last = build(
        builder,
        RequestOutput(1, "b", (4, 2), (BEST, BEST), finish_reason=FinishReason.STOP, stop_reason="é", stats=STATS),
        num_merged=6,
    )
    assert (first["text_output"], last["text_output"]) == (["p a"], ["b"])
    assert (first["finish_reason"], last["finish_reason"]) == (["None"], ["stop"])
    assert (first["stop_reason"], last["stop_reason"]) == (["null"], ['"é"'])
    assert (first["output_ids"], last["output_ids"]) == (Rows(((7,),), 0), Rows(((4, 2),), 0))
    assert (first["num_output_tokens"], last["num_output_tokens"]) == ([1], [2])
    assert (first["cumulative_logprob"], last["cumulative_logprob"]) == ([-2.0], [-3.0])
    assert (first["output_log_probs"], last["output_log_probs"]) == (Rows(([-2.0],), 0.0), Rows(([-0.5, -0.5],), 0.0))
    assert first["num_input_tokens"] == last["num_input_tokens"] == [3]
    assert list(told(first, "logprobs")[0].items()) == [entry(7, -2.0, 3), entry(4, -0.5, 1), entry(5, -1.0, 2)]
    assert told(first, "prompt_logprobs")[0] is None and len(told(first, "prompt_logprobs")) == 3
    assert "prompt_logprobs" not in last and "num_cached_tokens" not in first


def test_times_and_counts_come_at_the_end() -> None:
    output = RequestOutput(1, "b", (), finish_reason=FinishReason.LENGTH, stats=STATS)
    reply = build(make(frozenset({"perf_metrics", "num_cached_tokens"})), output, num_merged=6)
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
    assert build(make(wanted), output) == {"text_output": ["a"], "logprobs": ["null"], "prompt_logprobs": ["null"]}
    entries = told(build(make(wanted, logprobs=True), output), "logprobs")
    assert list(entries[0].items()) == [entry(4, -0.5, 1), entry(5, -9999.0, 2)]


def test_a_prompt_of_one_token_has_one_entry_which_is_null() -> None:
    builder = make(frozenset({"prompt_logprobs"}), num_input_tokens=1, prompt_logprobs=True)
    assert build(builder, RequestOutput(1, "a"))["prompt_logprobs"] == ["[null]"]
    assert "prompt_logprobs" not in build(builder, RequestOutput(1, "b"))


# Several sequences


def test_all_sequences_of_an_answer_are_elements_of_one_response() -> None:
    builder = make(WANTED, num_input_tokens=3, logprobs=True, num_sequences=2, prefix="p ", pad_id=9)
    first = RequestOutput(1, "a", (7, 5), (POSITION, BEST), finish_reason=FinishReason.STOP, stop_reason=5)
    second = RequestOutput(1, "b", (4,), (BEST,), (), FinishReason.LENGTH, stats=STATS, sequence_index=1, final=True)
    reply = build(builder, first, second)
    assert {name: reply[name] for name in ("text_output", "finish_reason", "stop_reason", "num_output_tokens")} == {
        "text_output": ["p a", "p b"],
        "finish_reason": ["stop", "length"],
        "stop_reason": ["5", "null"],
        "num_output_tokens": [2, 1],
    }
    assert reply["sequence_index"] == [0, 1] and reply["cumulative_logprob"] == reply["cum_log_probs"] == [-2.5, -0.5]
    assert reply["output_ids"] == Rows(((7, 5), (4,)), 9) and reply["sequence_length"] == [2, 1]
    assert reply["output_log_probs"] == Rows(([-2.0, -0.5], [-0.5]), 0.0)
    assert [len(json.loads(str(text))) for text in reply["logprobs"]] == [2, 1]  # type: ignore[union-attr]
    for name in ("num_input_tokens", "num_cached_tokens", "num_preemptions", "arrival_time_ns", "prompt_logprobs"):
        assert len(reply[name]) == 1, name  # type: ignore[arg-type]


def test_a_stream_of_several_sequences_says_which_unasked_and_keeps_their_sums_apart() -> None:
    wanted = frozenset({"cumulative_logprob"})
    builder = make(wanted, stream=True, num_sequences=2, prefix="p ")
    replies = [
        build(builder, RequestOutput(1, text, (7,), (POSITION,), sequence_index=index))
        for text, index in (("a", 1), ("b", 0), ("c", 1))
    ]
    assert replies == [
        {"text_output": ["p a"], "cumulative_logprob": [-2.0], "sequence_index": [1]},
        {"text_output": ["p b"], "cumulative_logprob": [-2.0], "sequence_index": [0]},
        {"text_output": ["c"], "cumulative_logprob": [-4.0], "sequence_index": [1]},
    ]
    assert set(build(make(stream=True), RequestOutput(1, "a"))) == {"text_output"}
    assert set(build(make(num_sequences=2), RequestOutput(1, "a"))) == {"text_output"}


def test_the_engines_own_sum_of_logprobs_goes_before_ours() -> None:
    output = RequestOutput(1, "a", (7,), (POSITION,), finish_reason=FinishReason.STOP, cumulative_logprob=-1.5)
    assert build(make(frozenset({"cumulative_logprob"})), output)["cumulative_logprob"] == [-1.5]


# Tensors


def test_every_output_has_its_switch_and_every_switch_an_output() -> None:
    outputs = {spec.name for spec in OUTPUTS}
    assert WANTED - {"perf_metrics", "log_probs", "context_logits", "generation_logits"} <= outputs
    output = RequestOutput(1, "a", (7,), (POSITION,), (BEST,), FinishReason.STOP, stats=STATS)
    assert set(build(make(WANTED, num_input_tokens=2, logprobs=True, prompt_logprobs=True), output)) == outputs


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
