"""Between Triton's objects and plain values: reading a request, sending its responses.

Holds what only the server's Python stub can import. A TritonReplyChannel lets its response sender go with the final
response, since a sender that is still held keeps the model from unloading.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.errors import ErrorCode, InvalidRequestError, NereidError, shorten
from nereid.request import RequestFailure
from nereid.server.arrays import OutputShape, array_of
from nereid.server.reply import Reply
from nereid.server.sources import RawRequest

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_request(request: Any) -> RawRequest:
    """The request's tensors and parameters. Raises InvalidRequestError where a tensor cannot be read."""
    inputs = {tensor.name(): _as_numpy(tensor) for tensor in request.inputs()}
    return RawRequest(inputs, json.loads(request.parameters() or "{}"), time.monotonic(), request.request_id())


def _as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = tensor.as_numpy()
    except Exception as error:  # of the stub's own kinds, for bytes without a right length prefix
        raise InvalidRequestError(f"{tensor.name()}: the tensor's bytes cannot be read: {error}") from error
    return array


def to_failure(error: BaseException) -> RequestFailure:
    """An error as data; one that nobody foresaw shows its type alone to the client, and its trace to the log."""
    if isinstance(error, NereidError):
        return RequestFailure(error.code, str(error))
    if isinstance(error, RecursionError):  # all else that recurses has a fixed depth
        return RequestFailure(ErrorCode.INVALID_ARGUMENT, "got JSON that is nested too deeply")
    logging.getLogger(__name__).error("unforeseen error", exc_info=error)
    return RequestFailure(NereidError.code, f"internal error ({type(error).__name__}); see the server's log")


class TritonReplyChannel:
    """The responses of one request."""

    def __init__(self, request: Any, shapes: Mapping[str, OutputShape]) -> None:
        """shapes: of each output of the deployment."""
        self._shapes = shapes
        self._request_id: str = request.request_id()
        self._sender: Any = request.get_response_sender()
        # Where the server traces this request with OpenTelemetry: the W3C headers of its span, as a JSON object.
        self.trace_context: str | None = request.trace().get_context()

    def send(self, reply: Reply, *, final: bool) -> None:
        # What the deployment has no output for is left out.
        known = {name: self._shapes[name] for name in reply if name in self._shapes}
        tensors = [pb_utils.Tensor(name, array_of(name, reply[name], shape)) for name, shape in known.items()]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final=final)

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
