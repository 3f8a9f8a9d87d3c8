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
    """Case 118: each ends with its answer or with UNAVAILABLE, and whoever is answered did not wait beyond the bound.

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
