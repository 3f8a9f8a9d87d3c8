"""Speaking to a running server by HTTP: whole requests, and raw sockets that close as rudely as wanted.

Every wait has an end. Helpers take the TritonServer that they speak to.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid.cli.server_process import HOST, TritonServer
from tests.server.waiting import TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request over HTTP got."""

    status: int
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def text(self) -> str:
        assert self.status == 200, self
        return str(self.json["text_output"])

    @property
    def error(self) -> str:
        return str(self.json["error"])


def body_of(prompt: str | None, sampling: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
    """A JSON body: a prompt, sampling parameters as their tensor, other inputs and parameters by name."""
    body = dict(fields)
    if prompt is not None:
        body["text_input"] = prompt
    if sampling is not None:
        body["sampling_parameters"] = json.dumps(sampling)
    return json.dumps(body).encode()


def http_call(server: TritonServer, method: str, path: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> Answer:
    connection = http.client.HTTPConnection(HOST, server.options.http_port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        response = connection.getresponse()
        return Answer(response.status, response.read())


def generate(
    server: TritonServer, model: str, prompt: str | None, sampling: Mapping[str, Any] | None = None, **fields: Any
) -> Answer:
    """One answer by /generate."""
    return http_call(server, "POST", f"/v2/models/{model}/generate", body_of(prompt, sampling, **fields))


def generate_stream(
    server: TritonServer, model: str, prompt: str | None, sampling: Mapping[str, Any] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """All events of /generate_stream."""
    body = body_of(prompt, sampling, **{"stream": True, **fields})
    answer = http_call(server, "POST", f"/v2/models/{model}/generate_stream", body)
    assert answer.status == 200, answer
    return events_in(answer.raw)


def infer(server: TritonServer, model: str, prompt: str, parameters: Mapping[str, Any]) -> Answer:
    """One answer by /infer."""
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]}
    body = json.dumps({"inputs": [text], "parameters": dict(parameters)}).encode()
    return http_call(server, "POST", f"/v2/models/{model}/infer", body)


def events_in(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(b"data: ")) for line in raw.splitlines() if line.startswith(b"data: ")]


def joined(events: Sequence[Mapping[str, Any]]) -> str:
    """The text of a stream's events; none of them an error."""
    assert not any("error" in event for event in events), events
    return "".join(event["text_output"] for event in events)


class RawConnection:
    """An HTTP request on a socket of its own, which can be left at any moment."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self.received = b""

    @property
    def num_events(self) -> int:
        return self.received.count(b"\ndata: ")

    def read_events(self, count: int) -> None:
        """Read until `count` events have come; fails where the stream ends before."""
        while self.num_events < count:
            piece = self._socket.recv(65536)
            assert piece, f"the stream ended: {self.received!r}"
            self.received += piece

    def read_to_end(self, timeout_s: float = TIMEOUT_S) -> None:
        """Read until the server closes the connection, in order or not, or has sent the last chunk."""
        self._socket.settimeout(timeout_s)  # between two pieces
        with contextlib.suppress(ConnectionResetError):
            while not self.received.endswith(b"\r\n0\r\n\r\n") and (piece := self._socket.recv(65536)):
                self.received += piece

    def leave(self, *, reset: bool) -> None:
        """Close: by RST, or by FIN."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@contextlib.contextmanager
def raw_stream(
    server: TritonServer, model: str, prompt: str, sampling: Mapping[str, Any] | None = None, **fields: Any
) -> Iterator[RawConnection]:
    body = body_of(prompt, sampling, **{"stream": True, **fields})
    connection = RawConnection(server.options.http_port, f"/v2/models/{model}/generate_stream", body)
    try:
        yield connection
    finally:
        connection.leave(reset=False)
