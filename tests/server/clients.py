"""Clients of a running server: HTTP, raw sockets that close as rudely as wanted, gRPC streams, metrics.

Every wait has an end. Helpers take the TritonServer that they speak to.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # servers are started while channels are open

import numpy as np
import psutil
import tritonclient.grpc as grpcclient

from nereid.cli.processes import session_processes
from nereid.cli.server_process import HOST, TritonServer

TIMEOUT_S = 60.0
_TYPES = {"text_input": "BYTES", "sampling_parameters": "BYTES", "input_ids": "INT32"}
_METRICS_AGE_S = 0.5  # metrics are published about every 0.2 s
_ID_IN_ERROR = re.compile(r"\(request id '(?P<ours>[^']*)'\)|\[request id: (?P<servers>[^\]]*)\]")

Item = TypeVar("Item")
Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Return once `condition` holds; fail with `what` where it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def at_once(task: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """The results of `task`, in order of `items`, `threads` at a time."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(task, items))


# HTTP


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


# gRPC


def inputs_of(prompt: str | bytes | None, sampling: Mapping[str, Any] | str | None = None, **fields: Any) -> list[Any]:
    """Input tensors: sampling as its tensor (a text is sent as it is), the other inputs by name."""
    values = dict(fields)
    if prompt is not None:
        values["text_input"] = prompt
    if sampling is not None:
        values["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
    return [_tensor(name, value) for name, value in values.items()]


def _tensor(name: str, value: Any) -> Any:
    elements = value if isinstance(value, list) else [value]
    kind = _TYPES.get(name, "BOOL")
    if kind == "BYTES":
        array = np.array([v.encode() if isinstance(v, str) else v for v in elements], dtype=object)
    else:
        array = np.array(elements, dtype=np.int32 if kind == "INT32" else bool)
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


@dataclass(slots=True)
class Streamed:
    """What one request on a gRPC stream got so far. at: when each response came, on the monotonic clock."""

    deltas: list[str] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        assert not self.errors, self.errors
        return "".join(self.deltas)

    @property
    def done(self) -> bool:
        return bool(self.errors) or (bool(self.finals) and self.finals[-1])

    @property
    def error(self) -> str:
        """The one error, which nothing else came with."""
        assert len(self.errors) == 1 and not self.finals, self
        return self.errors[0]

    def take(self, result: Any) -> None:
        response = result.get_response()
        self.at.append(time.monotonic())
        self.finals.append(response.parameters["triton_final_response"].bool_param)
        text = result.as_numpy("text_output")
        self.deltas.append("" if text is None else text[0].decode())
        reason, count = result.as_numpy("finish_reason"), result.as_numpy("num_output_tokens")
        self.reasons.append("" if reason is None else reason[0].decode())
        self.num_tokens += 0 if count is None else int(count[0])


class GrpcStream:
    """One bidirectional stream with many requests, told apart by their ids."""

    def __init__(self, server: TritonServer) -> None:
        self.answers: dict[str, Streamed] = {}
        self.other_errors: list[str] = []  # of no request that we sent
        self._changed = threading.Condition()
        self._client = grpcclient.InferenceServerClient(f"{HOST}:{server.options.grpc_port}")
        self._client.start_stream(self._take)

    def send(
        self,
        model: str,
        request_id: str,
        prompt: str | bytes | None,
        sampling: Mapping[str, Any] | str | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
        empty_final: bool = False,
        **fields: Any,
    ) -> Streamed:
        """Send a request; `fields` are its other inputs: it streams, and asks for all outputs, unless they say else."""
        asked = {"stream": True, "return_finish_reason": True, "return_num_output_tokens": True, **fields}
        given = {name: value for name, value in asked.items() if value is not None}
        return self.send_inputs(
            model, request_id, inputs_of(prompt, sampling, **given), parameters=parameters, empty_final=empty_final
        )

    def send_inputs(
        self,
        model: str,
        request_id: str,
        inputs: list[Any],
        *,
        parameters: Mapping[str, Any] | None = None,
        empty_final: bool = False,
    ) -> Streamed:
        answer = self.answers.setdefault(request_id, Streamed())
        self._client.async_stream_infer(
            model,
            inputs,
            request_id=request_id,
            parameters=dict(parameters) if parameters else None,
            enable_empty_final_response=empty_final,
        )
        return answer

    def _take(self, result: Any, error: Any) -> None:
        with self._changed:
            if error is not None:
                self._take_error(str(error))
            else:
                self.answers[result.get_response().id].take(result)
            self._changed.notify_all()

    def _take_error(self, message: str) -> None:
        match = _ID_IN_ERROR.search(message)
        answer = self.answers.get(match["ours"] or match["servers"]) if match else None
        (self.other_errors if answer is None else answer.errors).append(message)

    def wait(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Return once `condition` holds; it is looked at after each response."""
        with self._changed:
            held = self._changed.wait_for(condition, timeout_s)
        assert held, f"not within {timeout_s} s; open: {[i for i, a in self.answers.items() if not a.done][:5]}"

    def wait_done(self, timeout_s: float = TIMEOUT_S) -> dict[str, Streamed]:
        """All answers, each ended."""
        self.wait(lambda: all(answer.done for answer in self.answers.values()), timeout_s)
        assert not self.other_errors, self.other_errors
        return self.answers

    def close(self, *, cancel: bool = True) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the stream in order where all is answered; what still runs is cancelled."""
        self.close(cancel=not all(answer.done for answer in self.answers.values()))


def stream_texts(
    server: TritonServer, model: str, prompts: Sequence[str], sampling: Mapping[str, Any], timeout_s: float = TIMEOUT_S
) -> list[Streamed]:
    """All prompts at once on one gRPC stream; the answers in their order."""
    with GrpcStream(server) as stream:
        for index, prompt in enumerate(prompts):
            stream.send(model, str(index), prompt, sampling)
        return [stream.wait_done(timeout_s)[str(index)] for index in range(len(prompts))]


# The server's state


def gauge(server: TritonServer, name: str, model: str) -> float:
    """The value of a metric of one model."""
    connection = http.client.HTTPConnection(HOST, server.options.metrics_port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    match = re.search(rf'^{re.escape(name)}{{[^}}]*model_name="{re.escape(model)}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    assert match, f"no metric {name} of model {model}"
    return float(match[1])


def kv_cache_usage(server: TritonServer, model: str) -> float:
    return gauge(server, "vllm:kv_cache_usage_perc", model)


def num_running(server: TritonServer, model: str) -> float:
    return gauge(server, "vllm:num_requests_running", model)


def num_waiting(server: TritonServer, model: str) -> float:
    return gauge(server, "vllm:num_requests_waiting", model)


def wait_until_idle(server: TritonServer, model: str, within_s: float = 20.0) -> None:
    """Return once the model has used no KV block and run no request for as long as its metrics may be old."""
    idle_since: float | None = None

    def idle() -> bool:
        nonlocal idle_since
        if kv_cache_usage(server, model) or num_running(server, model) or num_waiting(server, model):
            idle_since = None
        elif idle_since is None:
            idle_since = time.monotonic()
        return idle_since is not None and time.monotonic() - idle_since > _METRICS_AGE_S

    wait_until(idle, f"{model} is idle", within_s)


def is_live(server: TritonServer) -> bool:
    return http_call(server, "GET", "/v2/health/live").status == 200


def is_ready(server: TritonServer, model: str) -> bool:
    return http_call(server, "GET", f"/v2/models/{model}/ready").status == 200


def load(server: TritonServer, model: str) -> Answer:
    return http_call(server, "POST", f"/v2/repository/models/{model}/load")


def unload(server: TritonServer, model: str) -> Answer:
    return http_call(server, "POST", f"/v2/repository/models/{model}/unload")


def stub_pid(server: TritonServer, model: str) -> int:
    """The Python process of a model."""
    for process in session_processes(server.pid):
        if len(process.command) > 1 and Path(process.command[1]).parts[-3:-2] == (model,):
            return process.pid
    raise AssertionError(f"model {model} has no process")


def resident_bytes_of(pid: int) -> int:
    size: int = psutil.Process(pid).memory_info().rss
    return size
