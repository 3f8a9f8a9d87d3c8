"""Answers of several sequences from the real server: n streams, one response of n elements, best_of, beam searches, by
all protocols and to each kind of deployment."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from nereid.cli.server_process import HOST, TritonServer
from nereid.tokenization.tokenizer import Tokenizer
from tests.server.conftest import loaded
from tests.server.grpc_client import GrpcStream, inputs_of
from tests.server.http_client import generate, generate_stream, raw_stream
from tests.server.metrics_page import metrics_page
from tests.server.server_state import num_running, wait_until_idle
from tests.server.test_contract import ask, end_to_end_tensors, one
from tests.server.waiting import wait_until

MODEL, PROMPT = "tiny", "Once upon a time"
FIELDS = {"max_tokens": 12, "seed": 7, "ignore_eos": True}
SWITCHES = {
    f"return_{name}": True
    for name in (
        "finish_reason", "stop_reason", "output_ids", "cumulative_logprob", "logprobs", "num_input_tokens",
        "num_output_tokens", "sequence_index", "num_cached_tokens",
    )
}  # fmt: skip
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


def whole(server: TritonServer, model: str = MODEL, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    """An answer that does not stream, without the prompt; each value as a list."""
    answer = generate(server, model, prompt, {**FIELDS, **fields}, exclude_input_in_output=True, **SWITCHES)
    assert answer.status == 200, answer
    return {name: value if isinstance(value, list) else [value] for name, value in answer.json.items()}


def ids_by_sequence(answer: Mapping[str, Any]) -> list[list[int]]:
    """The ids come one sequence after the other."""
    ends = np.cumsum(answer["num_output_tokens"])
    assert ends[-1] == len(answer["output_ids"])
    return [part.tolist() for part in np.split(np.array(answer["output_ids"]), ends[:-1])]


def joined_by_sequence(events: Sequence[Mapping[str, Any]]) -> list[str]:
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        texts[event["sequence_index"]] += event["text_output"]
    return [texts[index] for index in range(len(texts))]


# n


def test_an_answer_has_an_element_for_each_sequence(server: TritonServer, smollm2_tokenizer: Tokenizer) -> None:
    answer = whole(server, n=3, logprobs=2)
    assert len(set(answer["text_output"])) == 3, "they are drawn apart"
    assert answer["sequence_index"] == [0, 1, 2] and answer["num_output_tokens"] == [12, 12, 12]
    assert answer["finish_reason"] == ["length"] * 3 and answer["stop_reason"] == ["null"] * 3
    assert len(answer["num_input_tokens"]) == len(answer["num_cached_tokens"]) == 1
    for ids, logprobs, total in zip(
        ids_by_sequence(answer), answer["logprobs"], answer["cumulative_logprob"], strict=True
    ):
        entries = json.loads(logprobs)
        assert [int(next(iter(entry))) for entry in entries] == ids
        assert sum(entry[str(i)]["logprob"] for entry, i in zip(entries, ids, strict=True)) == pytest.approx(total)


def test_the_same_seed_gives_the_same_sequences_and_the_first_is_that_of_one_alone(server: TritonServer) -> None:
    four = whole(server, n=4)["text_output"]
    assert whole(server, n=4)["text_output"] == four
    assert whole(server, n=2)["text_output"] == four[:2] and whole(server)["text_output"] == four[:1]
    assert whole(server, n=4, seed=8)["text_output"] != four
    assert whole(server, n=3, temperature=0)["text_output"] == whole(server, temperature=0)["text_output"] * 3


@pytest.mark.parametrize("model", [MODEL, "smollm2"])
def test_streams_of_several_sequences_join_to_the_whole_answer(server: TritonServer, model: str) -> None:
    texts = whole(server, model, n=3, temperature=0.8)["text_output"]
    with GrpcStream(server) as stream:
        streamed = stream.send(model, "n", PROMPT, {**FIELDS, "n": 3, "temperature": 0.8})
        stream.wait_done()
    indices = [int(result.as_numpy("sequence_index")[0]) for result in streamed.results]
    assert {array.shape for array in (result.as_numpy("sequence_index") for result in streamed.results)} == {(1,)}
    pairs = list(zip(indices, streamed.deltas, strict=True))
    assert ["".join(delta for index, delta in pairs if index == own) for own in range(3)] == texts
    assert streamed.num_tokens == 36
    reasons = list(zip(indices, streamed.reasons, strict=True))
    for own in range(3):
        told = [reason for index, reason in reasons if index == own]
        assert told == ["None"] * (len(told) - 1) + ["length"]
    assert streamed.finals == [False] * (len(streamed.finals) - 1) + [True]


def test_sequences_of_a_stream_come_side_by_side(server: TritonServer) -> None:
    events = generate_stream(server, MODEL, PROMPT, {**FIELDS, "n": 3, "max_tokens": 300})
    indices = [event["sequence_index"] for event in events]
    turns = sum(before != after for before, after in zip(indices[:-1], indices[1:], strict=True))
    assert set(indices) == {0, 1, 2} and turns > 20


def test_server_sent_events_say_their_sequence_unasked(server: TritonServer) -> None:
    events = generate_stream(server, MODEL, PROMPT, {**FIELDS, "n": 3})
    assert joined_by_sequence(events) == whole(server, n=3)["text_output"]
    assert all(set(event) >= {"sequence_index", "text_output"} for event in events)
    assert not any("sequence_index" in event for event in generate_stream(server, MODEL, PROMPT, FIELDS))
    events = generate_stream(server, MODEL, PROMPT, {**FIELDS, "n": 2, "echo": True})
    assert [text.startswith(PROMPT) for text in joined_by_sequence(events)] == [True, True]


def test_each_sequence_ends_by_itself(server: TritonServer) -> None:
    """By a stop text of its own; each text begins with the prompt where it is echoed."""
    texts = whole(server, n=4)["text_output"]
    stop = next(text[5:8] for text in texts if sum(text[5:8] in other for other in texts) == 1)
    answer = generate(server, MODEL, PROMPT, {**FIELDS, "n": 4, "stop": stop}, **SWITCHES).json
    assert sorted(answer["finish_reason"]) == ["length", "length", "length", "stop"]
    expected = [PROMPT + (text[: text.index(stop)] if stop in text else text) for text in texts]
    assert answer["text_output"] == expected
    assert [json.loads(told) for told in answer["stop_reason"]] == [stop if stop in text else None for text in texts]
    assert len(set(answer["num_output_tokens"])) == 2


def test_every_sequence_follows_the_guide(server: TritonServer) -> None:
    several: tuple[dict[str, Any], ...] = ({"n": 4}, {"n": 2, "best_of": 4})
    for fields in several:
        guided: dict[str, Any] = {"max_tokens": 60, "guided_regex": "(ab|cd|é){5}!", "temperature": 20}
        texts = whole(server, **guided, **fields)["text_output"]
        assert all(re.fullmatch("(ab|cd|é){5}!", text) for text in texts), texts
        assert len(set(texts)) > 1


def test_the_prompts_logprobs_are_told_once(server: TritonServer) -> None:
    fields = {**FIELDS, "n": 3, "prompt_logprobs": 1}
    answer = generate(server, MODEL, PROMPT, fields, return_prompt_logprobs=True, return_num_input_tokens=True).json
    entries = json.loads(answer["prompt_logprobs"])
    assert entries[0] is None and len(entries) == answer["num_input_tokens"]
    events = generate_stream(server, MODEL, PROMPT, fields, return_prompt_logprobs=True)
    assert [("prompt_logprobs" in event) for event in events] == [True] + [False] * (len(events) - 1)
    told = json.loads(events[0]["prompt_logprobs"])
    assert [list(entry) for entry in told[1:]] == [list(entry) for entry in entries[1:]]


def test_priority_and_other_requests_beside_several_sequences(server: TritonServer) -> None:
    """Several sequences with a priority: what one says does not depend on what runs beside it."""
    alone = [whole(server, prompt=f"beside {i}", n=4, seed=i)["text_output"] for i in range(4)]
    with GrpcStream(server) as stream:
        for i in range(4):
            sampling = {**FIELDS, "n": 4, "seed": i, "priority": (-1) ** i * 5}
            stream.send(MODEL, str(i), f"beside {i}", sampling, stream=False, exclude_input_in_output=True)
        answers = stream.wait_done()
    for i, texts in enumerate(alone):
        (result,) = answers[str(i)].results
        assert [text.decode() for text in result.as_numpy("text_output")] == texts


# best_of


def test_best_of_tells_the_likeliest(server: TritonServer) -> None:
    all_four = whole(server, n=4)
    ranked = sorted(range(4), key=lambda index: -all_four["cumulative_logprob"][index])
    best = whole(server, n=2, best_of=4)
    assert best["text_output"] == [all_four["text_output"][index] for index in ranked[:2]]
    assert best["sequence_index"] == [0, 1]
    told = [all_four["cumulative_logprob"][index] for index in ranked[:2]]
    assert best["cumulative_logprob"] == pytest.approx(told, abs=1e-4)
    plain = generate(server, MODEL, PROMPT, {**FIELDS, "best_of": 4}, exclude_input_in_output=True).json
    assert plain["text_output"] == best["text_output"][0] and "sequence_index" not in plain


# Beam search


def test_a_beam_search_tells_its_best_first_and_finds_more_than_greed(server: TritonServer) -> None:
    greedy = whole(server, "smollm2", temperature=0, max_tokens=8)
    beams = whole(server, "smollm2", beam_width=4, max_tokens=8, length_penalty=0)
    totals = beams["cumulative_logprob"]
    assert len(totals) == 4 and totals == sorted(totals, reverse=True) and len(set(beams["text_output"])) == 4
    assert totals[0] >= greedy["cumulative_logprob"][0] - 1e-3
    assert beams["finish_reason"] == ["length"] * 4 and beams["num_output_tokens"] == [8] * 4
    best = whole(server, "smollm2", beam_width=4, n=1, max_tokens=8, length_penalty=0, temperature=0.3, top_p=0.1)
    assert best["text_output"] == beams["text_output"][:1], "how tokens would be drawn is without effect"
    for ids, logprobs in zip(ids_by_sequence(beams), whole(
        server, "smollm2", beam_width=4, max_tokens=8, length_penalty=0, logprobs=1
    )["logprobs"], strict=True):  # fmt: skip
        assert [int(next(iter(entry))) for entry in json.loads(logprobs)] == ids


def test_vllms_older_way_to_ask_for_beams(server: TritonServer) -> None:
    beams = whole(server, beam_width=3, n=2)["text_output"]
    assert whole(server, use_beam_search=True, best_of=3, n=2)["text_output"] == beams
    assert len(whole(server, use_beam_search=True, n=3)["text_output"]) == 3


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 3}, {"beam_width": 2}])
def test_what_is_known_at_the_end_alone_cannot_stream(server: TritonServer, fields: dict[str, Any]) -> None:
    with GrpcStream(server) as stream:
        refused = stream.send(MODEL, "a", PROMPT, fields)
        stream.wait_done()
        assert "INVALID_ARGUMENT: stream: got True; allowed: false with best_of above n" in refused.error
        taken = stream.send(MODEL, "b", PROMPT, fields, stream=False)
        stream.wait_done()
    assert [len(result.as_numpy("text_output")) for result in taken.results] == [2] and taken.finals == [True]


# Other deployments


def test_one_response_of_n_elements_by_unary_calls(server: TritonServer, tiny_unary: str) -> None:
    expected = whole(server, n=3)["text_output"]
    with grpcclient.InferenceServerClient(f"{HOST}:{server.options.grpc_port}") as client:
        asked = inputs_of(PROMPT, {**FIELDS, "n": 3}, exclude_input_in_output=True, return_finish_reason=True)
        result = client.infer(tiny_unary, asked)
    assert [text.decode() for text in result.as_numpy("text_output")] == expected
    assert list(result.as_numpy("finish_reason")) == [b"length"] * 3


@pytest.mark.parametrize("kind", ["num_return_sequences", "beam_width"])
def test_tensorrt_llms_clients_get_a_row_for_each_sequence(
    server: TritonServer, tiny_tensorrt_llm: str, kind: str
) -> None:
    tensors = end_to_end_tensors(stream=False)
    if kind == "beam_width":  # these clients send both, and mean all beams where they leave the other out
        del tensors["num_return_sequences"], tensors["stop_words"]
    tensors |= {kind: one(3, np.int32), "return_log_probs": one(True, bool), "pad_id": one(5, np.int32)}
    switches = {f"return_{name}": one(True, bool) for name in ("output_ids", "num_output_tokens", "sequence_index")}
    (result,) = ask(server, tiny_tensorrt_llm, {**tensors, **switches}, {}).results
    assert result.as_numpy("text_output").shape == (3,)
    lengths = result.as_numpy("sequence_length")
    ids, logprobs = result.as_numpy("output_ids"), result.as_numpy("output_log_probs")
    assert lengths.shape == result.as_numpy("cum_log_probs").shape == (1, 3)
    assert ids.shape == logprobs.shape == (1, 3, lengths.max())
    for row, values, length, total in zip(
        ids[0], logprobs[0], lengths[0], result.as_numpy("cum_log_probs")[0], strict=True
    ):
        assert (row[length:] == 5).all() and (values[length:] == 0).all()
        assert values.sum() == pytest.approx(total, abs=1e-3)
    assert result.as_numpy("sequence_index").tolist() == [[0, 1, 2]]


def test_tensorrt_llms_clients_stream_several_sequences(server: TritonServer, tiny_tensorrt_llm: str) -> None:
    tensors = {**end_to_end_tensors(stream=True), "num_return_sequences": one(2, np.int32)}
    answer = ask(server, tiny_tensorrt_llm, tensors, {})
    assert not answer.errors
    assert {int(result.as_numpy("sequence_index")[0][0]) for result in answer.results} == {0, 1}


# Ends


def test_a_client_that_cancels_ends_all_its_sequences(server: TritonServer) -> None:
    wait_until_idle(server, MODEL)
    with GrpcStream(server) as stream:
        for index, fields in enumerate(({"n": 4}, {"n": 1, "best_of": 3}, {"beam_width": 4})):
            stream.send(MODEL, str(index), PROMPT, {**LONG, **fields}, stream=index == 0)
        stream.wait(lambda: len(stream.answers["0"].finals) > 8)
        wait_until(lambda: num_running(server, MODEL) >= 4, "they run")
        stream.close(cancel=True)
        assert not any(answer.done for answer in stream.answers.values())
    wait_until_idle(server, MODEL, within_s=3)
    with raw_stream(server, MODEL, PROMPT, {**LONG, "n": 4}) as events:
        events.read_events(6)
        events.leave(reset=True)
    wait_until_idle(server, MODEL, within_s=3)


def test_a_deadline_ends_all_sequences_with_what_they_have(server: TritonServer) -> None:
    several: tuple[dict[str, Any], ...] = ({"n": 3}, {"n": 2, "best_of": 4}, {"beam_width": 3})
    for fields in several:
        answer = whole(server, timeout_ms=1500, **LONG, **fields)
        assert len(answer["text_output"]) == fields.get("n", 3), fields
        assert "timeout" in answer["finish_reason"] and set(answer["finish_reason"]) <= {"timeout", "stop"}
        assert any(answer["text_output"])
    events = generate_stream(server, MODEL, PROMPT, {**LONG, "n": 3, "timeout_ms": 1500}, return_finish_reason=True)
    ends = {event["sequence_index"]: event["finish_reason"] for event in events if event["finish_reason"] != "None"}
    assert ends == dict.fromkeys(range(3), "timeout")
    wait_until_idle(server, MODEL)


def test_sequences_that_are_told_are_counted_one_by_one_and_requests_once(server: TritonServer) -> None:
    with loaded(server, "tiny_memory") as model:  # it counts anew
        prompt = whole(server, model, n=3)["num_input_tokens"][0]
        whole(server, model, n=1, best_of=4)
        wanted = {
            "vllm:request_success_total": 3 + 1,
            "vllm:generation_tokens_total": 3 * 12 + 4 * 12,
            "vllm:prompt_tokens_total": 2 * prompt,
            "vllm:request_params_n_sum": 3 + 1,
            "vllm:request_params_n_count": 2,
            "vllm:e2e_request_latency_seconds_count": 2,
        }

        def counted() -> dict[str, float]:
            page = metrics_page(server, model)
            return {name: sum(page.values(name)) for name in wanted}

        wait_until(lambda: counted() == wanted, f"the metrics say {wanted}")
