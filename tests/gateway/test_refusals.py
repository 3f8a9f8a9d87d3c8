"""What the gateway refuses, and how it says so: OpenAI's error object, by status, with the field's name."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from contextlib import closing
from typing import Any

import openai
import pytest
from fastapi import Request

from nereid.cli.server_process import HOST, TritonServer
from nereid.gateway.errors import GatewayError
from nereid.gateway.reading import check_key
from tests.conftest import shared_data
from tests.gateway.conftest import KEY, Gateway, running_gateway
from tests.server.http_client import Answer
from tests.server.waiting import TIMEOUT_S

CHAT = {"model": "says", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def call(gateway: Gateway, path: str, body: object = None, method: str = "POST", key: str | None = None) -> Answer:
    """body: bytes are sent as they are, anything else as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(HOST, gateway.port, timeout=TIMEOUT_S)
    with closing(connection):
        connection.request(method, path, raw, {"Authorization": key} if key else {})
        response = connection.getresponse()
        return Answer(response.status, response.read())


def error_of(answer: Answer, status: int) -> dict[str, Any]:
    assert answer.status == status, answer
    error: dict[str, Any] = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Path, what is changed in a good body, the field that the error names, what its message says.
WRONG: list[tuple[str, dict[str, object], str | None, str]] = [
    (CHATS, {"messages": []}, "messages", "got []; allowed: a list of at least 1"),
    (CHATS, {"messages": "hello"}, "messages", "got 'hello'; allowed: a list"),
    (CHATS, {"messages": ["hello"]}, "messages[0]", "got 'hello'; allowed: an object"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (CHATS, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
    (CHATS, {"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
    (
        CHATS,
        {"messages": [{"role": "user", "contnt": "hi"}]},
        "messages[0].contnt",
        "unknown field 'messages[0].contnt' (did you mean 'content'?)",
    ),
    (CHATS, {"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio", "allowed: null"),
    (CHATS, {"messages": [{"role": "assistant", "content": "", "function_call": {}}]}, "messages[0].function_call", ""),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": "y"}]}]},
        "messages[0].content[0].txt",
        "did you mean 'text'",
    ),
    (
        CHATS,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "argumens": "{}"}}]}]},
        "messages[0].tool_calls[0].function.argumens",
        "did you mean 'arguments'",
    ),
    (CHATS, {"stream_options": {"include_usag": True}}, "stream_options.include_usag", "did you mean 'include_usage'"),
    (COMPLETIONS, {"stream_options": {"x": True}}, "stream_options.x", "'stream_options.x'; known: include_usage"),
    (COMPLETIONS, {"stream_options": [1]}, "stream_options", "got [1]; allowed: an object"),
    (CHATS, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "got 'king'; allowed: system"),
    (CHATS, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text or a list of parts"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "images, sound and files are not offered",
    ),
    (CHATS, {"n": 0}, "n", "got 0; allowed: at least 1"),
    (CHATS, {"n": 129}, "n", "got 129; allowed: at most 128"),
    (CHATS, {"best_of": 1}, "best_of", "unknown field"),
    (CHATS, {"reasoning_effort": "high"}, "reasoning_effort", "unknown field"),
    (CHATS, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
    (CHATS, {"stream": "perhaps"}, "stream", "got 'perhaps'; allowed: true or false"),
    (CHATS, {"max_completion_tokens": 1.5}, "max_completion_tokens", "got 1.5; allowed: a whole number"),
    (CHATS, {"max_completion_tokens": "many"}, "max_completion_tokens", "got 'many'; allowed: a whole number"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", "unless logprobs is true"),
    (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21; allowed: at most 20"),
    (CHATS, {"modalities": ["audio"]}, "modalities[0]", "got 'audio'; allowed: 'text'"),
    (CHATS, {"functions": [{"name": "f"}]}, "functions", "unknown field"),
    (CHATS, {"tool_choice": "required"}, "tool_choice", "no tools are given"),
    (CHATS, {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "got 'sometimes'; allowed: "),
    (CHATS, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    (CHATS, {"tools": [TOOL, TOOL]}, "tools[1].function.name", "no tool before has"),
    (
        CHATS,
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "got 'a b'; allowed: ",
    ),
    (
        CHATS,
        {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        "tools[0].function.paramters",
        "did you mean 'parameters'",
    ),
    (
        CHATS,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        "tools[0].function.parameters",
        "got 3; allowed: an object",
    ),
    (CHATS, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "unknown field"),
    (
        CHATS,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "a declared tool: f",
    ),
    (
        CHATS,
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "where tool_choice forces a call",
    ),
    (CHATS, {"model": ""}, "model", "got ''; allowed: a text of at least 1 character"),
    (CHATS, {"model": None}, "model", "missing"),
    (CHATS, {"model": 5}, "model", "got 5; allowed: a text"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs", "got -1; allowed: at least 0"),
    (COMPLETIONS, {"prompt": None}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": []}, "prompt", "got []; allowed: a text, a list"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "got [1, 'a']"),
    (COMPLETIONS, {"prompt": [1 << 64]}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": [(1 << 32) + 28]}, "prompt", "a list of token ids"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "a list of token ids"),
    (CHATS, {"model": "m" * 100_000}, "model", "256"),
    (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt", "a list of 1 to 128"),
    (COMPLETIONS, {"best_of": 129}, "best_of", "got 129; allowed: at most 128"),
    (COMPLETIONS, {"n": "two"}, "n", "got 'two'; allowed: a whole number"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "unknown field"),
    (COMPLETIONS, {"chat_template_kwargs": {}}, "chat_template_kwargs", "unknown field"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
    # The engine's own words, through the server.
    (COMPLETIONS, {"temperature": -1}, "temperature", "got -1; allowed: a number from 0"),
    (COMPLETIONS, {"prompt": [999999]}, "input_ids", "got 999999"),
    (COMPLETIONS, {"stream": True, "max_tokens": -5}, "max_tokens", "got -5"),
    (COMPLETIONS, {"n": 17}, "n", "got 17; allowed: 1 to 16 (at most 128 and max_num_seqs)"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of", "got 2; allowed: at least n (3)"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "stream", "got True; allowed: false with best_of above n"),
    (COMPLETIONS, {"beam_width": 2, "stream": True}, "stream", "got True; allowed: false with best_of above n"),
    (COMPLETIONS, {"beam_width": 2, "presence_penalty": 1}, "presence_penalty", "got 1.0; allowed: 0.0 with a beam"),
]


@pytest.mark.parametrize(("path", "change", "field", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_field_is_named(
    gateway: Gateway, path: str, change: dict[str, object], field: str | None, said: str
) -> None:
    body = {**(CHAT if path == CHATS else COMPLETION), **change}
    error = error_of(call(gateway, path, body), 400)
    assert said in error["message"] and error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"] and "pydantic" not in error["message"]
    if field is not None:
        assert error["param"] == field


@pytest.mark.parametrize("name", ["reasoning_effort", "prediction", "web_search_options", "zzz"])
def test_unknown_field_that_is_like_none_is_said_without_a_wrong_hint(gateway: Gateway, name: str) -> None:
    assert error_of(call(gateway, CHATS, {**CHAT, name: "x"}), 400)["message"] == f"unknown field {name!r}"


def test_what_the_clients_library_raises(client: openai.OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p: got 7") as bad:
        client.completions.create(model="tiny", prompt="x", top_p=7)
    assert bad.value.param == "top_p" and bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError, match="'no_such' does not exist here"):
        client.completions.create(model="no_such", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="not_loaded", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="embeddings are not offered"):
        client.embeddings.create(model="tiny", input="x")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "not JSON"),
        (b'{"a":' * 100_000, 400, "not JSON"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "not JSON"),
        (b'{"model": "tiny", "prompt": "\xff"}', 400, "not JSON"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "not JSON"),
        (b"[1]", 400, "a JSON object"),
        (b"7", 400, "a JSON object"),
        (b'{"model": "' + b"x" * (17 << 20) + b'"}', 413, "over 16777216 bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_body_that_is_none(gateway: Gateway, body: bytes, status: int, said: str) -> None:
    for path in (COMPLETIONS, CHATS):
        assert said in error_of(call(gateway, path, body), status)["message"]
    assert call(gateway, COMPLETIONS, COMPLETION).status == 200


def test_every_json_there_is(gateway: Gateway) -> None:
    files = sorted(shared_data("json_test_suite").rglob("*.json"))
    assert len(files) > 300
    for file in files:
        answer = call(gateway, COMPLETIONS, file.read_bytes())
        error_of(answer, 400)
        assert ("not JSON" not in str(answer.json)) if file.name.startswith("y_") else True, file.name


def test_paths_and_methods_that_there_are_not(gateway: Gateway) -> None:
    assert error_of(call(gateway, "/v1/no_such"), 404)["message"].startswith("POST '/v1/no_such'")
    assert "GET" in error_of(call(gateway, COMPLETIONS, method="GET"), 405)["message"]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [
        "says",
        "tiny",
    ]  # not the one not loaded, nor those it cannot ask
    assert {(model.object, model.owned_by) for model in models} == {("model", "nereid")}
    assert client.models.retrieve("tiny") == models[1] and models[1].created > 1.7e9
    for name in ("says_once", "says_batched", "not_loaded", "no_such"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "said"),
    [
        (["--api-key", ""], {}, 2, "argument --api-key: got an empty key"),
        (["--api-key", "s3cret", "--api-key", ""], {}, 2, "argument --api-key: got an empty key"),
        (["--api-key", " s3cret"], {}, 2, "argument --api-key: got a key with white space around it"),
        ([], {"NEREID_API_KEY": ""}, 1, "nereid: NEREID_API_KEY: got an empty key"),
    ],
)
def test_key_that_would_open_the_gateway_is_refused_at_start(
    arguments: list[str], environment: dict[str, str], status: int, said: str
) -> None:
    refused = refused_gateway(arguments, environment)
    assert refused.returncode == status and said in refused.stderr and "s3cret" not in refused.stderr


@pytest.mark.parametrize("keys", [("",), ("", "s3cret")])
@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", "Bearer  "])
def test_empty_key_is_never_let_in(keys: tuple[str, ...], sent: str | None) -> None:
    headers = [] if sent is None else [(b"authorization", sent.encode())]
    with pytest.raises(GatewayError) as refused:
        check_key(Request({"type": "http", "headers": headers}), keys)
    assert refused.value.status == 401


def test_an_open_gateway_says_so(triton: TritonServer) -> None:
    port = triton.options.grpc_port
    with running_gateway(port) as local:
        assert b"(open to everybody" in local.said and b"warning" not in local.said
    with running_gateway(port, ["--host", "0.0.0.0"]) as public:
        assert b"warning: the gateway has no key and listens on 0.0.0.0" in public.said
    with running_gateway(port, ["--host", "0.0.0.0", "--api-key", "a", "--api-key", "b"]) as keyed:
        assert b"(keys: 2)" in keyed.said and b"warning" not in keyed.said


@pytest.mark.parametrize(
    "address", ["nonsense", "", ":8001", "host:", "host:0", "host:x", "http://127.0.0.1:8001", "::1:8001", "a b:1"]
)
def test_address_that_is_none_is_refused_at_start(address: str) -> None:
    refused = refused_gateway([f"--grpc={address}"], {})
    assert refused.returncode == 2 and "argument --grpc: " in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("says_once", "its configuration has decoupled: false"),
        ("says_batched", "its configuration has max_batch_size: 1"),
    ],
)
def test_model_that_is_there_but_cannot_be_asked_says_why(gateway: Gateway, model: str, reason: str) -> None:
    for answer in (
        call(gateway, CHATS, {**CHAT, "model": model}),
        call(gateway, COMPLETIONS, {**COMPLETION, "model": model}),
        call(gateway, f"/v1/models/{model}", method="GET"),
    ):
        error = error_of(answer, 404)
        assert f"the model '{model}' cannot be asked here: {reason}" in error["message"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def refused_gateway(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nereid.cli", "gateway", "--port=1", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def test_keys(triton: TritonServer) -> None:
    with running_gateway(triton.options.grpc_port, environment={"NEREID_API_KEY": KEY}) as keyed:
        for key in (None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer ", "Bearer \xe9"):
            error = error_of(call(keyed, COMPLETIONS, COMPLETION, key=key), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert call(keyed, "/v1/models", method="GET", key=key).status == 401
        assert call(keyed, COMPLETIONS, COMPLETION, key=f"Bearer {KEY}").status == 200
        assert call(keyed, "/health", method="GET").json == {"status": "ok"}
        with keyed.client(KEY) as client, keyed.client("other") as stranger:
            assert client.models.list().data
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
