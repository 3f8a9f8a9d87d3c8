"""Speaking to a running server by gRPC streams, many requests on one.

Every wait has an end. Helpers take the TritonServer that they speak to.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # servers are started while channels are open

import numpy as np
import tritonclient.grpc as grpcclient

from nereid.cli.server_process import HOST, TritonServer
from nereid.server.tensors import INPUTS
from tests.server.waiting import TIMEOUT_S

_TYPES = {spec.name: spec.data_type.removeprefix("TYPE_").replace("STRING", "BYTES") for spec in INPUTS}
_ID_IN_ERROR = re.compile(r"\(request id '(?P<ours>[^']*)'\)|\[request id: (?P<servers>[^\]]*)\]")


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
    results: list[Any] = field(default_factory=list)

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
        self.reasons.append("" if reason is None else reason.reshape(-1)[0].decode())
        self.num_tokens += 0 if count is None else int(count.reshape(-1)[0])
        self.results.append(result)


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
