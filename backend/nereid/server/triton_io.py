"""Between Triton's objects and plain values: reading a request, sending its responses.

Holds what only the server's Python stub can import. A TritonReplyChannel lets its response sender go with the final
response, since a sender that is still held keeps the model from unloading.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.errors import InvalidRequestError, NereidError, shorten
from nereid.request import RequestFailure
from nereid.server.request_parser import RawRequest
from nereid.server.response_stream import Reply
from nereid.server.tensors import INPUTS

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_request(request: Any) -> RawRequest:
    """The request's tensors and parameters. Raises InvalidRequestError where a tensor cannot be read."""
    inputs = {}
    for spec in INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            inputs[spec.name] = _as_numpy(spec.name, tensor)
    return RawRequest(inputs, json.loads(request.parameters() or "{}"), time.monotonic())


def _as_numpy(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = tensor.as_numpy()
    except Exception as error:  # of the stub's own kinds, for bytes without a right length prefix
        raise InvalidRequestError(f"{name}: the tensor's bytes cannot be read: {error}") from error
    return array


def to_failure(error: BaseException) -> RequestFailure:
    """An error as data; one that nobody foresaw shows its type alone to the client, and its trace to the log."""
    if isinstance(error, NereidError):
        return RequestFailure(error.code, str(error))
    logging.getLogger(__name__).error("unforeseen error", exc_info=error)
    return RequestFailure(NereidError.code, f"internal error ({type(error).__name__}); see the server's log")


class TritonReplyChannel:
    """The responses of one request."""

    def __init__(self, request: Any) -> None:
        self._request_id: str = request.request_id()
        self._sender: Any = request.get_response_sender()
        # Where the server traces this request with OpenTelemetry: the W3C headers of its span, as a JSON object.
        self.trace_context: str | None = request.trace().get_context()

    def send(self, reply: Reply, *, final: bool) -> None:
        self._send(pb_utils.InferenceResponse(output_tensors=_tensors(reply)), final=final)

    def fail(self, failure: RequestFailure) -> None:
        # A gRPC stream's errors carry neither code nor request id: the message has to.
        whose = f" (request id {shorten(self._request_id)})" if self._request_id else ""
        message = f"{failure.code.name}: {failure.message}{whose}"
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, failure.code.value))
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), final=True)

    def cancelled(self) -> bool:
        return self._sender is not None and bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        sender = self._sender
        if final:
            self._sender = None
        sender.send(response, flags=_FINAL if final else 0)


def _tensors(reply: Reply) -> Sequence[Any]:
    tensors = [_strings("text_output", reply.text_output)]
    if reply.finish_reason is not None:
        tensors.append(_strings("finish_reason", reply.finish_reason))
    for name, count in (("num_input_tokens", reply.num_input_tokens), ("num_output_tokens", reply.num_output_tokens)):
        if count is not None:
            tensors.append(pb_utils.Tensor(name, np.array([count], dtype=np.uint32)))
    return tensors


def _strings(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8")], dtype=object))
