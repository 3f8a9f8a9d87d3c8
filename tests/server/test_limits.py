"""Limits of length, pool and queue: what is over one is refused at once, what is under it goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from nereid.cli.server_process import HOST, TritonServer
from tests.server.grpc_client import GrpcStream, inputs_of, stream_texts
from tests.server.http_client import generate, infer
from tests.server.server_state import gauge, num_running, num_waiting, wait_until_idle
from tests.server.waiting import wait_until

# By model of the shared repository: the most tokens of prompt and output together.
LIMITS = {"tiny_limit": 24, "tiny_pool": 48}


@pytest.fixture(params=list(LIMITS))
def limited(request: pytest.FixtureRequest) -> str:
    name: str = request.getfixturevalue(request.param)
    return name


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_prompt_at_the_limit_runs_and_one_over_it_is_refused(
    server: TritonServer, limited: str, max_tokens: int
) -> None:
    """Of the model's length, or of the pool where that is smaller; those behind go on."""
    limit = LIMITS[limited]
    lengths = [limit - 2, limit - 1, limit, limit + 1, limit * 2, 8191, 8192, 100_000]
    with GrpcStream(server) as stream:
        for length in lengths:
            sampling = {"max_tokens": max_tokens, "ignore_eos": True}
            stream.send(limited, f"long {length}", None, sampling, input_ids=[5] * length)
            stream.send(limited, f"behind {length}", "short", sampling)
        answers = stream.wait_done(20)
    for length in lengths:
        assert answers[f"behind {length}"].num_tokens == max_tokens
        if length < limit:
            assert answers[f"long {length}"].num_tokens == min(max_tokens, limit - length)
            assert answers[f"long {length}"].reasons[-1] == "length"
        else:
            assert f"got a prompt of {length} tokens" in answers[f"long {length}"].error
    wait_until_idle(server, limited)


@pytest.mark.parametrize("max_tokens", [1, 1 << 31, int(1e18), 1e18, "1000000000000000000"])
def test_max_tokens_is_cut_to_the_room_left(server: TritonServer, limited: str, max_tokens: Any) -> None:
    """Huge ones too, without memory for what never comes."""
    asked = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}
    answer = generate(server, limited, "a b c", {"max_tokens": max_tokens, "ignore_eos": True}, **asked).json
    room = LIMITS[limited] - answer["num_input_tokens"]
    assert answer["num_output_tokens"] == min(int(max_tokens), room)
    assert answer["finish_reason"] == "length"


def test_null_max_tokens_is_the_default(server: TritonServer) -> None:
    sampling = {"max_tokens": None, "ignore_eos": True}
    answer = generate(server, "tiny", "x", sampling, return_num_output_tokens=True).json
    assert answer["num_output_tokens"] == 16


def test_empty_and_blank_prompts(server: TritonServer) -> None:
    """A tokenizer without BOS makes no token of ""; the engine lives."""
    with GrpcStream(server) as stream:
        stream.send("tiny", "empty text", "")
        stream.send("tiny", "no ids", None, input_ids=[])
        stream.send("tiny", "blank", " ", {"max_tokens": 2, "ignore_eos": True})
        answers = stream.wait_done()
    assert "text_input" in answers["empty text"].error
    assert "input_ids" in answers["no ids"].error
    assert answers["blank"].num_tokens == 2
    assert generate(server, "tiny", None, input_ids=[]).status == 400


def test_preempted_requests_say_what_they_say_alone(server: TritonServer, tiny_pool: str) -> None:
    """Six requests want 240 tokens of a pool of 48; no delta is sent twice, none is missing."""
    settings = [{"max_tokens": 38, "seed": seed, "ignore_eos": True} for seed in range(6)]
    alone = [stream_texts(server, tiny_pool, ["go"], sampling)[0] for sampling in settings]
    before = gauge(server, "vllm:num_preemptions_total", tiny_pool)
    with GrpcStream(server) as stream:
        for sampling in settings:
            stream.send(tiny_pool, str(sampling["seed"]), "go", sampling)
        together = list(stream.wait_done().values())
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.num_tokens for answer in together] == [38] * 6
    wait_until(lambda: gauge(server, "vllm:num_preemptions_total", tiny_pool) > before, "preemptions were counted")
    wait_until_idle(server, tiny_pool)


ENDLESS = {"max_tokens": 8000, "ignore_eos": True}


def test_one_request_over_the_queue_limit_is_refused_and_one_that_waits_too_long(
    server: TritonServer, tiny_queue: str
) -> None:
    """By the stream's message, which alone can carry the code. The one that runs goes on."""
    with GrpcStream(server) as stream:
        running = stream.send(tiny_queue, "running", "x", ENDLESS)
        stream.wait(lambda: len(running.finals) > 0)
        for number in range(10):
            stream.send(tiny_queue, str(number), "x", {"max_tokens": 1})
        stream.wait(lambda: all(stream.answers[str(number)].done for number in range(10)))
        errors = [stream.answers[str(number)].error for number in range(10)]
        assert all("UNAVAILABLE: not scheduled within queue_timeout_ms (2500)" in error for error in errors[:2])
        assert all("UNAVAILABLE: the queue is full: max_queue_size 2" in error for error in errors[2:])
        assert not running.done
    wait_until_idle(server, tiny_queue)
    assert generate(server, tiny_queue, "x", {"max_tokens": 1}).status == 200


ENDS_AFTER_THE_QUEUE = {"max_tokens": 8000, "ignore_eos": True, "timeout_ms": 3500}


def test_refusals_of_the_queue_have_their_status_where_the_protocol_has_one(
    server: TritonServer, tiny_queue_unary: str
) -> None:
    """/infer answers 503, a unary gRPC call UNAVAILABLE, at the limit and after the wait."""
    with grpcclient.InferenceServerClient(f"{HOST}:{server.options.grpc_port}") as client:
        pool = ThreadPoolExecutor(3)
        calls = [pool.submit(infer, server, tiny_queue_unary, "x", ENDS_AFTER_THE_QUEUE) for _ in range(3)]
        pool.shutdown(wait=False)
        wait_until(lambda: num_running(server, tiny_queue_unary) == 1, "one runs")
        wait_until(lambda: num_waiting(server, tiny_queue_unary) == 2, "two wait")
        full = infer(server, tiny_queue_unary, "one more", {})
        assert full.status == 503
        assert "UNAVAILABLE: the queue is full" in full.error
        with pytest.raises(InferenceServerException, match="UNAVAILABLE: the queue is full") as refused:
            client.infer(tiny_queue_unary, inputs_of("one more"))
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
    statuses = sorted(call.result(30).status for call in calls)
    assert statuses == [200, 503, 503]
    wait_until_idle(server, tiny_queue_unary)
