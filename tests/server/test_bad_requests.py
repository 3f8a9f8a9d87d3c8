"""Requests that cannot be served: each is refused alone, with a message that names the field, and the server lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nereid.cli.server_process import TritonServer
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import body_of, generate, generate_stream, http_call, joined
from tests.server.server_state import is_ready

NESTED = "[" * 900 + "]" * 900
UNPRINTABLE_MARKS = ("Traceback", "/work/", "/root/", "/tmp/", ".py", "site-packages", "0x7f")
STOPS = [f"stop {i}" for i in range(65)]


@dataclass(frozen=True)
class Bad:
    """A request and the field that its refusal must name. inputs: beside the prompt, which may be replaced."""

    field: str
    sampling: dict[str, Any] | str | None = None
    prompt: str | None = "a good prompt"
    inputs: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.field}-{str(self.sampling or self.inputs or self.prompt)[:40]}"


PARAMETERS = [
    Bad("max_tokens", {"max_tokens": 0}),
    Bad("max_tokens", {"max_tokens": -1}),
    Bad("max_tokens", {"max_tokens": 1.5}),
    Bad("max_tokens", {"max_tokens": "many"}),
    Bad("max_tokens", {"max_tokens": True}),
    Bad("max_tokens", {"max_tokens": ""}),
    Bad("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    Bad("min_tokens", {"min_tokens": -1}),
    Bad("temperature", {"temperature": -0.1}),
    Bad("temperature", {"temperature": "hot"}),
    Bad("temperature", {"temperature": 1e7}),
    Bad("temperature", {"temperature": "nan"}),
    Bad("top_k", {"top_k": -2}),
    Bad("top_k", {"top_k": 0.5}),
    Bad("top_p", {"top_p": 1.1}),
    Bad("top_p", {"top_p": -0.1}),
    Bad("min_p", {"min_p": 2}),
    Bad("seed", {"seed": 1 << 64}),
    Bad("seed", {"seed": "x"}),
    Bad("ignore_eos", {"ignore_eos": "maybe"}),
    Bad("ignore_eos", {"ignore_eos": 1.0}),
    Bad("timeout_ms", {"timeout_ms": 0}),
    Bad("n", {"n": 0}),
    Bad("n", {"n": 65}),
    Bad("n", {"n": "two"}),
    Bad("best_of", {"n": 3, "best_of": 2}),
    Bad("num_return_sequences", {"num_return_sequences": 1000}),
    Bad("n", {"n": 3, "beam_width": 2}),
    Bad("beam_width", {"beam_width": 1.5}),
    Bad("best_of", {"best_of": 3, "beam_width": 2}),
    Bad("length_penalty", {"length_penalty": "long"}),
    Bad("early_stopping", {"early_stopping": "never"}),
    Bad("use_beam_search", {"use_beam_search": True}),
    Bad("presence_penalty", {"beam_width": 2, "presence_penalty": 1}),
    Bad("guided_regex", {"beam_width": 2, "guided_regex": "a+"}),
    Bad("logit_bias", {"logit_bias": "5"}),
    Bad("lora_name", {"lora_name": "mine"}),
    Bad("guided_json", {"guided_json": "{"}),
    Bad("max_token", {"max_token": 4}),
    Bad("Temperature", {"Temperature": 1}),
]
ONLY_IN_JSON = [
    Bad("priority", {"priority": 2**31}),
    Bad("max_tokens", {"max_tokens": [1]}),
    Bad("max_tokens", {"max_tokens": {"value": 1}}),
    Bad("stop", {"stop": 5}),
    Bad("stop_token_ids", {"stop_token_ids": "none"}),
    Bad("stop", {"stop": ["a", 1]}),
    Bad("stop", {"stop": STOPS}),
    Bad("stop", {"stop": {"a": "b"}}),
    Bad("stop", {"stop": ["\ud800"]}),
    Bad("stop_token_ids", {"stop_token_ids": [49152]}),
    Bad("stop_token_ids", {"stop_token_ids": [-1]}),
    Bad("stop_token_ids", {"stop_token_ids": [1 << 40], "min_tokens": 1}),
    Bad("stop_token_ids", {"stop_token_ids": [1.0]}),
    Bad("sampling_parameters", ""),
    Bad("sampling_parameters", "max_tokens=4"),
    Bad("sampling_parameters", "[1]"),
    Bad("sampling_parameters", "null"),
    Bad("sampling_parameters", '{"temperature": NaN}'),
    Bad("sampling_parameters", '{"temperature": 1'),
    Bad("sampling_parameters", '{"max_tokens": 1} {}'),
    Bad("temperature", '{"temperature": 1e999}'),
    Bad("sampling_parameters", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
]
TENSORS = [
    Bad("text_input", prompt=None),
    Bad("text_input", inputs={"input_ids": [1, 2]}),
    Bad("messages", inputs={"messages": '[{"role": "user", "content": "x"}]'}),
    Bad("messages[0].role", prompt=None, inputs={"messages": '[{"role": "root", "content": "x"}]'}),
    Bad("messages[0].content", prompt=None, inputs={"messages": '[{"role": "user", "content": 5}]'}),
    Bad("messages", prompt=None, inputs={"messages": '[{"role": "user", "content": "\\ud800"}]'}),
    Bad("nested", prompt=None, inputs={"messages": '[{"role": "user", "content": "x", "a": ' + NESTED + "}]"}),
    Bad("messages", prompt=None, inputs={"messages": "[" * 100_000}),
    Bad("text_input", prompt=""),
    Bad("text_input", prompt="many words " * 20_000),
    Bad("text_input", prompt="x" * 5_000_000),
    Bad("input_ids", prompt=None, inputs={"input_ids": [49152]}),
    Bad("input_ids", prompt=None, inputs={"input_ids": [5, -1]}),
    Bad("stream", inputs={"stream": [True, False]}),
    Bad("exclude_input_in_output", inputs={"exclude_input_in_output": [True, True]}),
    Bad("return_finish_reason", inputs={"return_finish_reason": [True, True]}),
    Bad("sampling_parameters", inputs={"sampling_parameters": ["{}", "{}"]}),
]
TABLE = [*PARAMETERS, *ONLY_IN_JSON, *TENSORS]


def assert_names(message: str, field: str) -> None:
    assert field in message
    assert len(message) < 2000, "a refusal repeats the request"
    assert not any(mark in message for mark in UNPRINTABLE_MARKS), message


@pytest.fixture(scope="module")
def undisturbed(server: TritonServer) -> Iterator[None]:
    """While the module's tests run, a long stream runs beside them; at its end it has said what it says alone."""
    sampling = {"max_tokens": 1500, "seed": 11, "ignore_eos": True}
    with GrpcStream(server) as stream:
        beside = stream.send("tiny", "beside", "A long story", sampling)
        yield
        stream.wait_done()
        alone = stream.send("tiny", "alone", "A long story", sampling)
        stream.wait_done()
        assert beside.text == alone.text
        assert beside.num_tokens == 1500


@pytest.mark.usefixtures("undisturbed")
class TestRefused:
    """While a good request runs beside them."""

    @pytest.mark.parametrize("bad", TABLE, ids=str)
    def test_by_generate(self, server: TritonServer, bad: Bad) -> None:
        """max_tokens of 0 and -1, and an empty prompt."""
        inputs = dict(bad.inputs or {})
        if isinstance(bad.sampling, str):
            inputs["sampling_parameters"] = bad.sampling
        sampling = bad.sampling if isinstance(bad.sampling, dict) else None
        answer = generate(server, "tiny", bad.prompt, sampling, **inputs)
        assert answer.status == 400, answer
        assert_names(answer.error, bad.field)

    @pytest.mark.parametrize("bad", PARAMETERS, ids=str)
    def test_as_request_parameters_of_generate(self, server: TritonServer, bad: Bad) -> None:
        assert isinstance(bad.sampling, dict)
        for body in (bad.sampling, {"parameters": bad.sampling}):
            answer = generate(server, "tiny", bad.prompt, **body)
            assert answer.status == 400, answer
            assert_names(answer.error, bad.field)

    @pytest.mark.parametrize("body", [{"max_tokens": None}, {"top_k": [5]}, {"max_tokens": {}}], ids=str)
    def test_as_request_parameters_that_only_the_server_sees(self, server: TritonServer, body: dict[str, Any]) -> None:
        answer = generate(server, "tiny", "a good prompt", **body)
        assert answer.status == 400, answer
        assert_names(answer.error, next(iter(body)))

    def test_by_grpc(self, server: TritonServer) -> None:
        with GrpcStream(server) as stream:
            for index, bad in enumerate(TABLE):
                inputs = {"stream": None, **(bad.inputs or {})}
                sampling = None if "sampling_parameters" in inputs else bad.sampling
                stream.send("tiny", str(index), bad.prompt, sampling, **inputs)
            answers = stream.wait_done()
        for index, bad in enumerate(TABLE):
            assert_names(answers[str(index)].error, bad.field)

    def test_as_request_parameters_by_grpc(self, server: TritonServer) -> None:
        sendable = [bad for bad in PARAMETERS if _can_be_a_grpc_parameter(bad)]
        with GrpcStream(server) as stream:
            for index, bad in enumerate(sendable):
                assert isinstance(bad.sampling, dict)
                stream.send("tiny", str(index), bad.prompt, parameters=bad.sampling)
            answers = stream.wait_done()
        for index, bad in enumerate(sendable):
            assert_names(answers[str(index)].error, bad.field)

    def test_in_a_stream_an_explicit_echo(self, server: TritonServer) -> None:
        with GrpcStream(server) as stream:
            streamed = stream.send("tiny", "a", "x", exclude_input_in_output=False)
            stream.wait_done()
        assert_names(streamed.error, "exclude_input_in_output")

    def test_unknown_model_and_unknown_input(self, server: TritonServer) -> None:
        assert generate(server, "no_such_model", "x").status == 404
        answer = generate(server, "tiny", "x", no_such_input="y")
        assert answer.status == 400
        assert_names(answer.error, "no_such_input")

    def test_declared_input_of_a_wrong_json_type_is_refused_by_the_server(self, server: TritonServer) -> None:
        bodies = [b'{"text_input": 5}', b'{"stop": 5}', b'{"stream": "yes"}', b'{"input_ids": ["a"]}', b'{"tools": []}']
        for body in bodies:
            assert http_call(server, "POST", "/v2/models/tiny/generate", body).status in (400, 500)


def _can_be_a_grpc_parameter(bad: Bad) -> bool:
    """The protocol has texts, booleans and 64-bit whole numbers."""
    return all(
        isinstance(value, (str, bool)) or (isinstance(value, int) and abs(value) < 1 << 63)
        for value in (bad.sampling or {}).values()  # type: ignore[union-attr]
    )


def test_one_bad_request_of_a_batch_of_eight_is_refused_alone(server: TritonServer) -> None:
    """The other seven say what they say alone."""
    good = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    with GrpcStream(server) as stream:
        for index in range(8):
            sampling = {"max_tokens": 20, "top_p": "high"} if index == 3 else good
            stream.send("tiny", f"batch {index}", f"prompt {index}", sampling)
        stream.wait_done()
        assert "INVALID_ARGUMENT: top_p" in stream.answers["batch 3"].error
        for index in (0, 1, 2, 4, 5, 6, 7):
            alone = stream.send("tiny", f"alone {index}", f"prompt {index}", good)
            stream.wait_done()
            assert stream.answers[f"batch {index}"].text == alone.text


def test_stop_works_as_a_list_and_as_a_text(server: TritonServer) -> None:
    """List-valued stop, as JSON and as a tensor by both protocols; a text also as a request parameter."""
    whole = joined(generate_stream(server, "tiny", "stop here", {"max_tokens": 40, "seed": 4}))
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    for value in (stop, [stop], ["not in it at all", stop]):
        sampling = {"max_tokens": 40, "seed": 4, "stop": value}
        assert joined(generate_stream(server, "tiny", "stop here", sampling)) == expected
        answer = generate(server, "tiny", "stop here", sampling, exclude_input_in_output=True)
        assert answer.text == expected
        with GrpcStream(server) as stream:
            streamed = stream.send("tiny", "a", "stop here", sampling)
            stream.wait_done()
        assert (streamed.text, streamed.reasons[-1]) == (expected, "stop")
    body: dict[str, Any] = {"max_tokens": 40, "seed": 4, "exclude_input_in_output": True}
    for value in (stop, ["not in it at all", stop]):
        assert generate(server, "tiny", "stop here", **body, stop=value).text == expected
    with GrpcStream(server) as stream:
        streamed = stream.send("tiny", "a", "stop here", {"max_tokens": 40, "seed": 4}, stop=["no", stop])
        stream.wait_done()
    assert (streamed.text, streamed.reasons[-1]) == (expected, "stop")


def test_requests_that_raise_in_execute_do_not_wedge_the_model(server: TritonServer) -> None:
    """Each ends with one error, and the model goes on."""
    with GrpcStream(server) as stream:
        for index in range(10):
            stream.send("tiny", str(index), None)
        for answer in stream.wait_done().values():
            assert answer.error.startswith("INVALID_ARGUMENT: text_input")
    assert is_ready(server, "tiny")
    assert generate(server, "tiny", "x").status == 200


def shared_memory_in_use(server: TritonServer) -> int:
    """Bytes of all shared-memory files of this server's stubs."""
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"{server._shm_prefix}*"))


def fail_many_times(server: TritonServer, count: int) -> None:
    with GrpcStream(server) as stream:
        for start in range(0, count, 500):
            for index in range(start, start + 500):
                stream.send("tiny", str(index), "x" * 200, {"max_tokens": 0})
            stream.wait_done()
        assert all(answer.error for answer in stream.answers.values())


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_shared_memory_is_flat_over_failing_requests(server: TritonServer, count: int) -> None:
    fail_many_times(server, 500)
    before = shared_memory_in_use(server)
    assert before > 0
    fail_many_times(server, count)
    assert shared_memory_in_use(server) == before


def test_refused_stream_is_no_event_but_a_status(server: TritonServer) -> None:
    body = body_of("x", {"max_tokens": 0}, stream=True)
    answer = http_call(server, "POST", "/v2/models/tiny/generate_stream", body)
    assert answer.status == 400
    assert b"max_tokens" in answer.raw
