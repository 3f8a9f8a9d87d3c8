"""Clients that close, reset, cancel or stop reading: their requests end, their blocks come back, others go on."""

from __future__ import annotations

import time

import pytest

from nereid.cli.server_process import TritonServer
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import RawConnection, body_of, generate, generate_stream, joined, raw_stream
from tests.server.server_state import kv_cache_usage, num_running, num_waiting, wait_until_idle
from tests.server.waiting import at_once, wait_until

LONG = {"max_tokens": 4000, "ignore_eos": True}


def leave_a_stream(server: TritonServer, model: str, number: int) -> None:
    """Read 1 to 3 events, then close: each second client by RST."""
    with raw_stream(server, model, f"Tell me story number {number}", {**LONG, "seed": number}) as stream:
        stream.read_events(1 + number % 3)
        stream.leave(reset=number % 2 == 1)


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_200_streaming_clients_that_leave_give_their_blocks_back(server: TritonServer, model: str) -> None:
    wait_until_idle(server, model)
    sampling = {"max_tokens": 12, "seed": 1}
    before = generate(server, model, "The capital of France is", sampling).text
    at_once(lambda number: leave_a_stream(server, model, number), range(200), threads=25)
    wait_until_idle(server, model)
    assert generate(server, model, "The capital of France is", sampling).text == before


def test_clients_that_leave_generate_are_bounded_by_their_deadline(server: TritonServer) -> None:
    """This server does not report them, so their requests run until timeout_ms."""
    wait_until_idle(server, "tiny")
    body = body_of("Tell me a story", LONG, timeout_ms=2500)
    for number in range(50):
        RawConnection(server.options.http_port, "/v2/models/tiny/generate", body).leave(reset=number % 2 == 1)
    wait_until(lambda: num_running(server, "tiny") > 0, "the requests run")
    wait_until_idle(server, "tiny", within_s=10)
    assert generate(server, "tiny", "x").status == 200


def test_stopping_a_grpc_stream_returns_at_once_and_frees_the_blocks(server: TritonServer) -> None:
    """With thousands of tokens left."""
    with GrpcStream(server) as stream:
        for number in range(8):
            stream.send("tiny", str(number), "Tell me a story", LONG)
        wait_until(lambda: num_running(server, "tiny") == 8, "all run")
        assert kv_cache_usage(server, "tiny") > 0
        started = time.monotonic()
        stream.close(cancel=True)
        assert time.monotonic() - started < 1.0
    wait_until_idle(server, "tiny", within_s=3)


def test_request_cancelled_before_its_first_token_leaves_the_queue(server: TritonServer, tiny_queue: str) -> None:
    """One runs and two wait, which is the limit; once these two are cancelled there is room for two again."""
    with GrpcStream(server) as running, GrpcStream(server) as waiting:
        first = running.send(tiny_queue, "first", "a", LONG)
        running.wait(lambda: len(first.finals) > 0)
        for name in ("second", "third"):
            waiting.send(tiny_queue, name, "b", LONG)
        wait_until(lambda: num_waiting(server, tiny_queue) == 2, "two wait")
        refused = running.send(tiny_queue, "fourth", "c", LONG)
        running.wait(lambda: bool(refused.errors))
        assert "UNAVAILABLE: the queue is full" in refused.error
        waiting.close(cancel=True)
        assert not any(answer.finals for answer in waiting.answers.values())
        wait_until(lambda: num_waiting(server, tiny_queue) == 0, "nobody waits", within_s=1.5)
        taken = running.send(tiny_queue, "fifth", "d", LONG)
        wait_until(lambda: num_waiting(server, tiny_queue) == 1, "a place in the queue is free again")
        assert not taken.errors and not first.done
    wait_until_idle(server, tiny_queue)


def test_client_that_reads_nothing_slows_nobody(server: TritonServer) -> None:
    with raw_stream(server, "tiny", "never read", {**LONG, "seed": 1}):
        events = generate_stream(server, "tiny", "read", {"max_tokens": 200, "seed": 2, "ignore_eos": True})
        assert joined(events)
    wait_until_idle(server, "tiny")


def test_stream_asked_of_generate_is_refused_by_the_server_and_ends(server: TritonServer) -> None:
    """The server's own answer, which this version gives under status 200, after the first response."""
    answer = generate(server, "tiny", "Tell me a story", {"max_tokens": 500, "ignore_eos": True}, stream=True)
    assert "expects model to produce exactly 1 response" in answer.error
    wait_until_idle(server, "tiny")
