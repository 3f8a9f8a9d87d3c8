"""Bytes that are no proper request: bodies that are no JSON, too deep, too large, in crumbs; tensors of wrong bytes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from nereid.cli.server_process import HOST, TritonServer
from tests.conftest import shared_data
from tests.server.grpc_client import GrpcStream, inputs_of
from tests.server.http_client import generate, http_call
from tests.server.server_state import is_live, resident_bytes_of, stub_pid
from tests.server.waiting import TIMEOUT_S

GENERATE = "/v2/models/tiny/generate"
MIB = 1 << 20


def json_suite() -> list[Path]:
    files = sorted(shared_data("json_test_suite").glob("*.json"))
    assert len(files) > 300
    return files


def test_json_suite_as_a_body(server: TritonServer) -> None:
    """None of these is a request, so each is an error and none ends the server."""
    for path in json_suite():
        answer = http_call(server, "POST", GENERATE, path.read_bytes())
        assert 400 <= answer.status < 600, (path.name, answer)
    assert is_live(server)


@pytest.mark.parametrize("key", [None, "logit_bias", "stop"])
def test_json_suite_as_sampling_parameters(server: TritonServer, key: str | None) -> None:
    """The whole of it, or a value in it; by gRPC, which carries any bytes. What is no JSON is refused as such;
    the rest names the parameter that it cannot be."""
    files = json_suite()
    before = resident_bytes_of(stub_pid(server, "tiny"))
    with GrpcStream(server) as stream:
        for path in files:
            content = path.read_bytes() if key is None else b'{"%s": %s}' % (key.encode(), path.read_bytes())
            inputs = inputs_of("x", None, stream=False)
            stream.send_inputs("tiny", path.name, [*inputs, raw_strings("sampling_parameters", content)])
        answers = stream.wait_done()
    for path in files:
        answer = answers[path.name]
        if path.name.startswith("n_"):
            assert "INVALID_ARGUMENT: sampling_parameters" in answer.error, path.name
        elif answer.errors:
            assert answer.error.startswith("INVALID_ARGUMENT: "), path.name
    accepted = "y_string_unicode.json" if key == "stop" else "y_object_empty.json"
    assert answers[accepted].errors == []
    assert resident_bytes_of(stub_pid(server, "tiny")) - before < 64 * MIB


def raw_strings(name: str, value: bytes) -> Any:
    (tensor,) = inputs_of(None, None, **{name: value})
    return tensor


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"text_input": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"text_input": "x", "temperature": NaN}',
        b'{"text_input": "x", "temperature": -Infinity}',
        b'{"text_input": "\xff\xfe"}',
        b'{"text_input": "\\ud800"}',
        b"\x00" * 1000,
        b"",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_deep_or_broken_body_is_refused(server: TritonServer, body: bytes) -> None:
    """This server itself dies of a nesting of 150,000."""
    answer = http_call(server, "POST", GENERATE, body)
    assert 400 <= answer.status < 600, answer
    assert is_live(server)


def test_body_in_chunks_of_one_byte(server: TritonServer) -> None:
    """100,000 of them."""
    start, end = b'{"max_tokens": 1, "text_input": "', b'"}'
    body = start + b"x" * (100_000 - len(start) - len(end)) + end
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with socket.create_connection((HOST, server.options.http_port), timeout=TIMEOUT_S) as connection:
        connection.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        status = connection.recv(65536).split(maxsplit=2)[1]
    assert status[:1] in (b"2", b"4", b"5"), status
    assert is_live(server)


@pytest.mark.parametrize("size", [5 * MIB, 65 * MIB])
@pytest.mark.parametrize("field", ["text_input", "sampling_parameters"])
def test_large_body_is_refused_and_its_memory_comes_back(server: TritonServer, size: int, field: str) -> None:
    before = resident_bytes_of(stub_pid(server, "tiny"))
    body = json.dumps({"text_input": "x", field: "a" * size}).encode()
    for _ in range(3):
        try:
            answer = http_call(server, "POST", GENERATE, body)
        except (BrokenPipeError, ConnectionResetError):
            assert size > 64 * MIB  # the server's own limit: it answers, or closes, before it has read all
        else:
            assert 400 <= answer.status < 600
    assert is_live(server)
    assert generate(server, "tiny", "x").status == 200
    assert resident_bytes_of(stub_pid(server, "tiny")) - before < 3 * 64 * MIB


# Raw tensors


@pytest.fixture
def unary_call(server: TritonServer, tiny_unary: str) -> Iterator[Any]:
    """Sends text_input (or another tensor) as bytes as they are; returns the text that came, or raises RpcError."""
    with grpc.insecure_channel(f"{HOST}:{server.options.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def call(raw: bytes, shape: tuple[int, ...] = (1,), name: str = "text_input", kind: str = "BYTES") -> bytes:
            request = service_pb2.ModelInferRequest(model_name=tiny_unary, raw_input_contents=[raw])
            request.inputs.add(name=name, datatype=kind, shape=shape)
            response = stub.ModelInfer(request, timeout=TIMEOUT_S)
            names = [output.name for output in response.outputs]
            content: bytes = response.raw_output_contents[names.index("text_output")]
            return content[4:]

        yield call


def prefixed(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (b"", (1,)),
        (b"\x01", (1,)),
        (b"\x01\x00", (1,)),
        (b"\x01\x00\x00", (1,)),
        (b"\x01\x00\x00\x00", (1,)),
        (b"\x05\x00\x00\x00abc", (1,)),
        (b"\xff\xff\xff\xffabc", (1,)),
        (b"\x01\x00\x00\x00abc", (1,)),
        (b"plain text", (1,)),
        (prefixed(b"a", b"b"), (1,)),
        (prefixed(b"a"), (2,)),
        (prefixed(b"a", b"b"), (2,)),
        (prefixed(b"a"), (1, 1)),
        (prefixed(b"a"), (0,)),
        (prefixed(b"a"), (-1,)),
    ],
)
def test_bytes_without_a_right_prefix_or_number_are_an_error(
    server: TritonServer, unary_call: Any, raw: bytes, shape: tuple[int, ...]
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        unary_call(raw, shape)
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert "text_input" in refused.value.details()
    assert is_live(server)


@pytest.mark.parametrize("text", [b"a\0b", b"a\0\0", b"\0a", "é\0日本".encode(), b" a ", b"a\r\n"])
def test_text_round_trips_whole(unary_call: Any, text: bytes) -> None:
    """A NUL neither ends a text nor is stripped from its end."""
    assert unary_call(prefixed(text)).startswith(text)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"ok \xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_text_that_is_not_utf8_is_refused_by_its_field(unary_call: Any, text: bytes) -> None:
    with pytest.raises(grpc.RpcError, match="text_input: got .* allowed: text in UTF-8"):
        unary_call(prefixed(text))


@pytest.mark.parametrize(("kind", "raw"), [("INT32", b"\x05\0\0"), ("INT64", b"\x05" + b"\0" * 7), ("FP32", b"\0" * 4)])
def test_ids_of_another_type_or_size_are_refused(unary_call: Any, kind: str, raw: bytes) -> None:
    with pytest.raises(grpc.RpcError, match="input_ids"):
        unary_call(raw, (1,), "input_ids", kind)
