"""A model with `decoupled: false`: one response a request, by every protocol, with in-flight batching all the same."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from nereid.cli.server_process import HOST, TritonServer
from tests.server.grpc_client import inputs_of
from tests.server.http_client import Answer, body_of, generate, http_call, infer
from tests.server.server_state import num_running, wait_until_idle
from tests.server.waiting import at_once, wait_until

SAMPLING = {"max_tokens": 12, "seed": 8, "ignore_eos": True}


def first_output(answer: Answer) -> str:
    assert answer.status == 200, answer
    outputs = {output["name"]: output["data"] for output in answer.json["outputs"]}
    return str(outputs["text_output"][0])


def test_every_protocol_gives_the_text_that_a_decoupled_model_gives(server: TritonServer, tiny_unary: str) -> None:
    expected = generate(server, "tiny", "unary", SAMPLING).text
    assert generate(server, tiny_unary, "unary", SAMPLING).text == expected
    assert first_output(infer(server, tiny_unary, "unary", SAMPLING)) == expected
    with grpcclient.InferenceServerClient(f"{HOST}:{server.options.grpc_port}") as client:
        asked = inputs_of("unary", SAMPLING, return_finish_reason=True, return_num_output_tokens=True)
        result = client.infer(tiny_unary, asked)
    assert result.as_numpy("text_output")[0].decode() == expected
    assert result.as_numpy("finish_reason")[0] == b"length"
    assert list(result.as_numpy("num_output_tokens")) == [12]


def test_many_calls_are_batched_in_flight(server: TritonServer, tiny_unary: str) -> None:
    sampling = {**SAMPLING, "max_tokens": 120}
    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(infer, server, tiny_unary, f"call {i}", {**sampling, "seed": i}) for i in range(16)]
        wait_until(lambda: num_running(server, tiny_unary) > 8, "more than eight run at once")
        together = [first_output(call.result(60)) for call in calls]
    wait_until_idle(server, tiny_unary)
    for number in (0, 7, 15):
        alone = infer(server, tiny_unary, f"call {number}", {**sampling, "seed": number})
        assert first_output(alone) == together[number]


def test_errors_have_the_status_of_their_code(server: TritonServer, tiny_unary: str) -> None:
    answer = infer(server, tiny_unary, "x", {"max_tokens": 0})
    assert answer.status == 400
    assert "INVALID_ARGUMENT: max_tokens" in answer.error
    with (
        grpcclient.InferenceServerClient(f"{HOST}:{server.options.grpc_port}") as client,
        pytest.raises(InferenceServerException, match="INVALID_ARGUMENT: max_tokens") as refused,
    ):
        client.infer(tiny_unary, inputs_of("x", {"max_tokens": 0}))
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_stream_is_refused(server: TritonServer, tiny_unary: str) -> None:
    for path in ("generate", "generate_stream"):
        body = body_of("x", SAMPLING, stream=True)
        answer = http_call(server, "POST", f"/v2/models/{tiny_unary}/{path}", body)
        assert answer.status == 400
        assert b"stream: got True" in answer.raw


def test_one_bad_call_among_many_is_refused_alone(server: TritonServer, tiny_unary: str) -> None:
    def call(number: int) -> Answer:
        return infer(server, tiny_unary, "x", {"temperature": -1} if number % 4 == 3 else SAMPLING)

    answers = at_once(call, range(32), threads=16)
    assert [answer.status for answer in answers] == [400 if number % 4 == 3 else 200 for number in range(32)]
    assert len({first_output(answer) for answer in answers if answer.status == 200}) == 1


def test_decoupled_model_refuses_infer_by_the_servers_own_words(server: TritonServer) -> None:
    answer = infer(server, "tiny", "x", SAMPLING)
    assert answer.status == 501
    assert "decoupled" in json.dumps(answer.json)
