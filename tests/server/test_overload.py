"""More requests than there is room for, and requests that look alike: each gets what is its own."""

from __future__ import annotations

import time

from nereid.cli.server_process import TritonServer
from tests.server.grpc_client import GrpcStream, Streamed, stream_texts
from tests.server.server_state import wait_until_idle

# The model `tiny_overload` has two seats and eight places in its queue, where nobody waits longer than this.
SEATS, PLACES, QUEUE_TIMEOUT_S = 2, 10, 1.5
# From the step that a request is first scheduled in to its first token at the client, on a busy machine.
SERVICE_S = 1.0
NUM_TOKENS = 40


def test_ten_times_as_many_requests_as_there_are_places(server: TritonServer, tiny_overload: str) -> None:
    """Each ends with its answer or with UNAVAILABLE, and whoever is answered did not wait beyond the bound.

    Half come at once, the others spread over two seconds, while the first are served.
    """
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    sent: dict[str, float] = {}
    with GrpcStream(server) as stream:
        for number in range(10 * PLACES):
            if number >= 5 * PLACES:
                time.sleep(2 / (5 * PLACES))
            sent[str(number)] = time.monotonic()
            stream.send(tiny_overload, str(number), f"request {number}", sampling)
        answers = stream.wait_done()
    refused = {number: answer.error for number, answer in answers.items() if answer.errors}
    assert all("UNAVAILABLE: " in error for error in refused.values()), refused
    answered = {number: answer for number, answer in answers.items() if not answer.errors}
    assert len(answered) >= SEATS and len(refused) >= 2 * PLACES
    assert all((answer.num_tokens, answer.reasons[-1]) == (NUM_TOKENS, "length") for answer in answered.values())
    ttft = sorted(answer.at[0] - sent[number] for number, answer in answered.items())
    print(
        f"{len(answered)} answered, {len(refused)} refused, TTFT p50 {ttft[len(ttft) // 2]:.2f} s, max {ttft[-1]:.2f} s"
    )
    assert ttft[int(0.99 * (len(ttft) - 1))] <= QUEUE_TIMEOUT_S + SERVICE_S
    wait_until_idle(server, tiny_overload)


def test_a_flood_of_one_tenant_does_not_hold_another_up(server: TritonServer, tiny_overload: str) -> None:
    """One fills both seats and the whole queue with long requests; the other's first token comes all the same at once,
    at the cost of one that waits and, for a while, of one that runs."""
    long = {"max_tokens": 300, "ignore_eos": True, "cache_salt": "flood", "timeout_ms": 60_000}
    with GrpcStream(server) as flood, GrpcStream(server) as other:
        streams = [flood.send(tiny_overload, str(number), "flood", long) for number in range(SEATS + 8)]
        flood.wait(lambda: sum(bool(stream.deltas) for stream in streams) == SEATS)
        before = sum(stream.num_tokens for stream in streams)
        answer = other.send(tiny_overload, "other", "one", {"max_tokens": 4, "ignore_eos": True, "cache_salt": "other"})
        other.wait_done()
        after = sum(stream.num_tokens for stream in streams)
        assert (answer.num_tokens, answer.errors) == (4, [])
        assert after - before < 300 < SEATS * 300 - before, "none of the flood had to end first"
        flood.wait_done()
    refused = [stream.error for stream in streams if stream.errors]
    assert refused and all("UNAVAILABLE: " in error for error in refused), refused
    assert any("cache_salt has more than its share" in error for error in refused), refused
    assert all(stream.num_tokens == 300 for stream in streams if not stream.errors)
    wait_until_idle(server, tiny_overload)


def test_who_matters_more_comes_before_those_who_wait(server: TritonServer, tiny_overload: str) -> None:
    sampling = {"max_tokens": 20, "ignore_eos": True}
    with GrpcStream(server) as stream:
        waiting = [stream.send(tiny_overload, str(number), "wait", sampling) for number in range(SEATS + 2)]
        stream.wait(lambda: sum(bool(each.deltas) for each in waiting) == SEATS)
        first = stream.send(tiny_overload, "first", "me", {**sampling, "priority": -100})
        last = stream.send(tiny_overload, "last", "not me", {**sampling, "priority": 100})
        stream.wait_done()
    assert not first.errors and first.at[0] < min(each.at[0] for each in waiting[SEATS:])
    assert not last.errors and last.at[0] > max(each.at[0] for each in waiting)
    wait_until_idle(server, tiny_overload)


def seeded(number: int) -> dict[str, object]:
    return {"max_tokens": 40, "seed": number, "ignore_eos": True}


def alone(server: TritonServer, number: int) -> str:
    return stream_texts(server, "tiny", ["say"], seeded(number))[0].text


def test_one_request_id_on_many_connections(server: TritonServer) -> None:
    """Each connection gets its own text; one that leaves takes no other with it."""
    expected = [alone(server, number) for number in range(3)]
    assert len(set(expected)) == 3
    leaving = GrpcStream(server)
    leaving.send("tiny", "same", "say", {"max_tokens": 8000, "ignore_eos": True})
    with GrpcStream(server) as first, GrpcStream(server) as second, GrpcStream(server) as third:
        streams = (first, second, third)
        for number, stream in enumerate(streams):
            stream.send("tiny", "same", "say", seeded(number))
        leaving.close(cancel=True)
        answers = [stream.wait_done()["same"] for stream in streams]
    assert [answer.text for answer in answers] == expected
    assert [answer.num_tokens for answer in answers] == [40] * 3
    wait_until_idle(server, "tiny")


def test_one_request_id_many_times_on_one_connection(server: TritonServer) -> None:
    """As whole answers, since a stream's pieces have nothing but the id to be told apart by."""
    expected = sorted(alone(server, number) for number in range(4))
    with GrpcStream(server) as stream:
        for number in range(4):
            answer: Streamed = stream.send(
                "tiny", "same", "say", seeded(number), stream=False, exclude_input_in_output=True
            )
        stream.wait(lambda: sum(answer.finals) == 4 or bool(answer.errors))
    assert not answer.errors and answer.num_tokens == 160
    assert sorted(answer.deltas) == expected
    wait_until_idle(server, "tiny")
