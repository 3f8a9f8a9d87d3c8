"""Streams: their end, their requests kept apart, their length, and what they leave behind."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nereid.cli.server_process import TritonServer
from tests.server.grpc_client import GrpcStream, Streamed, stream_texts
from tests.server.http_client import generate, generate_stream, joined
from tests.server.server_state import resident_bytes_of, stub_pid, wait_until_idle
from tests.server.waiting import at_once

VOCAB_SIZE, MOST_STOP_IDS = 49152, 1024


@pytest.fixture(scope="module")
def stops_at_once(server: TritonServer) -> dict[str, Any]:
    """Sampling parameters with which the prompt "x" ends by its first token: one of these ids is what tiny draws."""
    for start in range(0, VOCAB_SIZE, MOST_STOP_IDS):
        ids = list(range(start, start + MOST_STOP_IDS))
        sampling = {"stop_token_ids": ids, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        answer = generate(server, "tiny", "x", sampling, return_finish_reason=True, return_num_output_tokens=True)
        if (answer.json["finish_reason"], answer.json["num_output_tokens"]) == ("stop", 1):
            return sampling
    raise AssertionError("tiny draws no id at all")


def assert_ends_with_final(answer: Streamed, reason: str) -> None:
    """One final response, which is the last and carries text or none, and the finish reason."""
    assert answer.finals == [False] * (len(answer.finals) - 1) + [True]
    assert answer.reasons == ["None"] * (len(answer.reasons) - 1) + [reason]


@pytest.mark.parametrize("empty_final", [False, True])
def test_last_data_carries_the_final_flag_and_nothing_follows(
    server: TritonServer, stops_at_once: dict[str, Any], empty_final: bool
) -> None:
    """With and without enable_empty_final_response."""
    with GrpcStream(server) as stream:
        long = stream.send("tiny", "long", "x", {"max_tokens": 20, "ignore_eos": True}, empty_final=empty_final)
        short = stream.send("tiny", "short", "x", {"max_tokens": 1}, empty_final=empty_final)
        stopped = stream.send("tiny", "stopped", "x", stops_at_once, empty_final=empty_final)
        whole = stream.send("tiny", "whole", "x", {"max_tokens": 5}, stream=False, empty_final=empty_final)
        stream.wait_done()
        stream.send("tiny", "later", "x", {"max_tokens": 30, "ignore_eos": True})  # anything late would come before
        stream.wait_done()
        assert_ends_with_final(long, "length")
        assert_ends_with_final(short, "length")
        assert_ends_with_final(stopped, "stop")
        assert_ends_with_final(whole, "length")
        assert (long.num_tokens, short.num_tokens, stopped.num_tokens) == (20, 1, 1)
        assert len(whole.finals) == 1


def test_refusal_is_the_one_final_response_of_its_request(server: TritonServer) -> None:
    """Also with enable_empty_final_response nothing follows an error."""
    with GrpcStream(server) as stream:
        refused = stream.send("tiny", "refused", "x", {"max_tokens": 0}, empty_final=True)
        stream.wait_done()
        stream.send("tiny", "later", "x", {"max_tokens": 30, "ignore_eos": True})
        stream.wait_done()
        assert refused.error.startswith("INVALID_ARGUMENT")


def test_generate_is_one_response_with_every_output_that_was_asked_for(server: TritonServer) -> None:
    """Stream false, the default."""
    asked = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    answer = generate(server, "tiny", "one response", {"max_tokens": 7, "ignore_eos": True}, **asked).json
    assert answer["text_output"].startswith("one response")
    assert (answer["finish_reason"], answer["num_input_tokens"], answer["num_output_tokens"]) == ("length", 2, 7)
    assert set(generate(server, "tiny", "x").json) == {"model_name", "model_version", "text_output"}


@pytest.mark.parametrize("stream", [True, False])
def test_text_of_no_tokens_is_one_event_with_its_finish_reason(
    server: TritonServer, stops_at_once: dict[str, Any], stream: bool
) -> None:
    """The first token is one that stops."""
    fields = {"stream": stream, "return_finish_reason": True, "exclude_input_in_output": True}
    (event,) = generate_stream(server, "tiny", "x", stops_at_once, **fields)
    assert (event["text_output"], event["finish_reason"]) == ("", "stop")


def test_requests_with_the_same_id_on_two_streams_are_kept_apart(server: TritonServer) -> None:
    first, second = {"max_tokens": 60, "seed": 1}, {"max_tokens": 60, "seed": 2}
    alone = [joined(generate_stream(server, "tiny", "same id", sampling)) for sampling in (first, second)]
    with GrpcStream(server) as one, GrpcStream(server) as other:
        answers = [one.send("tiny", "same", "same id", first), other.send("tiny", "same", "same id", second)]
        one.wait_done()
        other.wait_done()
    assert [answer.text for answer in answers] == alone


def test_requests_with_the_same_id_on_one_stream_all_end(server: TritonServer) -> None:
    with GrpcStream(server) as stream:
        for _ in range(5):
            answer = stream.send("tiny", "same", "x", {"max_tokens": 10, "ignore_eos": True})
        stream.wait(lambda: sum(answer.finals) == 5)
        assert answer.num_tokens == 50


def test_numbers_may_come_as_texts(server: TritonServer) -> None:
    """As load tools send them."""
    numbers: dict[str, Any] = {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 50, "top_p": 0.9}
    numbers |= {"min_p": 0.01, "seed": 3}
    texts: dict[str, Any] = {name: str(value) for name, value in numbers.items()}
    expected = generate(server, "tiny", "x", numbers).text
    assert generate(server, "tiny", "x", texts).text == expected
    assert generate(server, "tiny", "x", **numbers).text == expected
    assert generate(server, "tiny", "x", **texts).text == expected
    assert generate(server, "tiny", "x", parameters=texts).text == expected
    with GrpcStream(server) as stream:
        by_grpc = stream.send("tiny", "a", "x", parameters=texts, stream=False)
        stream.wait_done()
    assert by_grpc.text == expected


def test_sampling_parameters_go_before_request_parameters(server: TritonServer) -> None:
    """All of them but timeout_ms, which is valid beside the tensor."""
    asked = {"return_num_output_tokens": True, "return_finish_reason": True}
    counted = generate(server, "tiny", "x", {"max_tokens": 3, "ignore_eos": True}, max_tokens=9, **asked).json
    assert counted["num_output_tokens"] == 3
    endless = {"max_tokens": 8000, "ignore_eos": True}
    assert generate(server, "tiny", "x", endless, timeout_ms=200, **asked).json["finish_reason"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_deadline_ends_a_request_with_what_it_has(server: TritonServer, stream: bool) -> None:
    sampling = {"max_tokens": 8000, "ignore_eos": True, "timeout_ms": 500}
    with GrpcStream(server) as grpc:
        answer = grpc.send("tiny", "a", "x", sampling, stream=stream)
        grpc.wait_done(10)
    assert answer.reasons[-1] == "timeout"
    assert 0 < answer.num_tokens < 8000
    wait_until_idle(server, "tiny")


def test_seed_gives_the_same_text_whatever_runs_beside(server: TritonServer) -> None:
    sampling = {"max_tokens": 40, "seed": 99, "ignore_eos": True}
    alone = generate(server, "tiny", "seeded", sampling).text
    beside = at_once(lambda _: generate(server, "tiny", "seeded", sampling).text, range(8), threads=8)
    assert beside == [alone] * 8
    assert generate(server, "tiny", "seeded", {**sampling, "seed": 98}).text != alone


def test_chat_of_many_languages_is_echoed_as_it_was_sent(server: TritonServer) -> None:
    for prompt in ("naïve café", "日本語のテキスト", "🇫🇷👩‍👩‍👧‍👦", "‮right to left‬", "a\u0000b", "tab\tand\nline"):
        assert generate(server, "tiny", prompt, {"max_tokens": 3}).text.startswith(prompt)


def count_messages(stream: GrpcStream, total: int, *, at_a_time: int, tokens: int) -> int:
    """Run requests of `tokens` tokens on one stream until `total` tokens have come, forgetting what is done."""
    messages = count = number = 0
    while count < total:
        stream.answers.clear()
        for _ in range(at_a_time):
            number += 1
            stream.send("tiny", str(number), "x", {"max_tokens": tokens, "ignore_eos": True, "temperature": 0})
        stream.wait_done(300)
        assert all(answer.num_tokens == tokens for answer in stream.answers.values())
        messages += sum(len(answer.finals) for answer in stream.answers.values())
        count += at_a_time * tokens
    return messages


@pytest.mark.parametrize(
    ("total", "idle_s"), [(4000, 1), pytest.param(1_000_000, 300, marks=[pytest.mark.slow, pytest.mark.timeout(5400)])]
)
def test_one_stream_carries_very_many_messages(server: TritonServer, total: int, idle_s: int) -> None:
    """No token is lost, before and after the stream has lain idle."""
    with GrpcStream(server) as stream:
        messages = count_messages(stream, total // 2, at_a_time=8, tokens=250)
        time.sleep(idle_s)  # what is tested is an idle connection
        messages += count_messages(stream, total // 2, at_a_time=8, tokens=250)
    print(f"{messages} messages for {total} tokens")


def resident_bytes(server: TritonServer, model: str) -> dict[str, int]:
    """Of the server and of the model's stub."""
    return {"server": resident_bytes_of(server.pid), "stub": resident_bytes_of(stub_pid(server, model))}


# The fault that was reported lost 3.4 MB per 10,000 responses.
_LIMIT_PER_10_000_RESPONSES = 1 << 20


@pytest.mark.parametrize(
    ("rounds", "responses"), [(4, 3000), pytest.param(5, 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_memory_is_flat_over_streamed_responses(
    server: TritonServer, tiny_memory: str, rounds: int, responses: int
) -> None:
    """After the second round."""
    sampling = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
    sizes = []
    for _ in range(rounds):
        for _ in range(0, responses, 3000):
            prompts = [f"prompt {index}" for index in range(10)]
            answers = stream_texts(server, tiny_memory, prompts, sampling)
            assert [answer.num_tokens for answer in answers] == [300] * 10
        sizes.append(resident_bytes(server, tiny_memory))
    print(sizes)
    limit = _LIMIT_PER_10_000_RESPONSES * max(1.0, (rounds - 2) * responses / 10_000)
    growth = {program: sizes[-1][program] - sizes[1][program] for program in sizes[0]}
    assert all(grown < limit for grown in growth.values()), growth
