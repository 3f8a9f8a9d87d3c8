"""Triton: the one connection to the server: which models it has, and the answers of one request each.

What always holds: a stream carries one request and ends with it, in order where the answer is whole, by cancellation
where nobody wants the rest. (An open stream, idle or not, would keep the server from unloading a model, and from
ending.) All streams share one channel, which finds a server that comes back within a second.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from nereid.gateway.errors import GatewayError, not_offered, of_call, of_triton, unavailable, unknown_model
from nereid.gateway.pieces import Piece, read_pieces

_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_CALL_TIMEOUT_S = 10.0
_NEEDED = frozenset({"text_input", "stream", "sampling_parameters"})


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked. inputs: the names of the input tensors that it takes."""

    name: str
    inputs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Question:
    """One request to a model. id: its name in the server's logs.  tensors: texts, truth values and lists of token ids
    by input name.  num_sequences: that the answer has."""

    id: str
    tensors: Mapping[str, str | bool | list[int]]
    sampling: Mapping[str, object]
    num_sequences: int = 1


class Triton:
    """Made inside the event loop that uses it."""

    def __init__(self, address: str) -> None:
        """address: HOST:PORT of the server's gRPC endpoint; it need not be there yet."""
        self._client = aio.InferenceServerClient(address, channel_args=_CHANNEL)

    async def close(self) -> None:
        await self._client.close()

    async def ready(self) -> bool:
        """Whether the server is there and takes requests."""
        try:
            return bool(await self._client.is_server_ready(client_timeout=_CALL_TIMEOUT_S))
        except InferenceServerException:
            return False

    async def model_names(self) -> list[str]:
        """The models that can be asked now. Raises GatewayError."""
        try:
            index = await self._client.get_model_repository_index(client_timeout=_CALL_TIMEOUT_S)
        except InferenceServerException as error:
            raise _failure(error) from error
        ready = {entry.name for entry in index.models if entry.state == "READY"}
        return [name for name in sorted(ready) if isinstance(await self._find(name), Model)]

    async def model(self, name: str) -> Model:
        """Raises GatewayError: 404 where there is none that can be asked."""
        if isinstance(found := await self._find(name), GatewayError):
            raise found
        return found

    async def _find(self, name: str) -> Model | GatewayError:
        """The model, or why there is none that can be asked."""
        try:
            answer = await self._client.get_model_config(name, client_timeout=_CALL_TIMEOUT_S)
        except InferenceServerException as error:
            failure = _failure(error)
            if failure.status == 404:
                return unknown_model(name)
            raise failure from error
        inputs = frozenset(tensor.name for tensor in answer.config.input)
        reason = _obstacle(answer.config, inputs)
        return not_offered(name, reason) if reason else Model(name, inputs)

    async def ask(self, model: Model, question: Question) -> AsyncGenerator[Piece, None]:
        """The pieces of the answer, of each sequence at least one, whose last has a finish_reason. Raises GatewayError.

        Close it (`aclose`) to cancel the request. Tensors that the model does not take are left out.
        """
        prompt_ids = question.tensors.get("input_ids")
        # Made here and not by the stream, which would wait for ever for a request that cannot be made.
        responses = self._client.stream_infer(_once(_request(model, question)))
        unfinished, failure = set(range(question.num_sequences)), None
        try:
            async for result, error in responses:  # to the stream's end: an answered one must not be cancelled
                if error is not None:
                    failure = failure or of_triton(error.message())
                    continue
                for piece in read_pieces(result, prompt_ids if isinstance(prompt_ids, list) else None):
                    if not 0 <= piece.sequence_index < question.num_sequences:
                        raise GatewayError(500, "the model answers with more sequences than asked for", code="internal")
                    if piece.finish_reason is not None:
                        unfinished.discard(piece.sequence_index)
                    yield piece
        except grpc.RpcError as error:
            raise of_call(error.code().name, error.details() or "") from error
        finally:
            responses.cancel()  # does nothing to a stream that has ended
        if failure is not None or unfinished:
            raise failure or unavailable("the server ended the answer before it was whole")


def _obstacle(config: Any, inputs: Set[str]) -> str | None:
    """Why a model with this configuration cannot be asked; None where it can be."""
    if lacking := sorted(_NEEDED - inputs):
        return f"it has no input {', '.join(lacking)}"
    if not config.model_transaction_policy.decoupled:
        return "its configuration has decoupled: false; the gateway asks models with decoupled: true"
    if config.max_batch_size > 0:  # its tensors have a leading dimension: for TensorRT-LLM's clients
        return f"its configuration has max_batch_size: {config.max_batch_size}; the gateway asks models with 0"
    return None


def _failure(error: InferenceServerException) -> GatewayError:
    return of_call(str(error.status()).removeprefix("StatusCode."), error.message())


def _request(model: Model, question: Question) -> dict[str, Any]:
    tensors = {**question.tensors, "sampling_parameters": json.dumps(question.sampling)}
    inputs = [_tensor(name, value) for name, value in tensors.items() if name in model.inputs]
    return {"model_name": model.name, "inputs": inputs, "request_id": question.id}


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The one request of a stream; the client's side of the stream ends after it."""
    yield request


def _tensor(name: str, value: str | bool | list[int]) -> Any:
    if isinstance(value, str):
        kind, array = "BYTES", np.array([value.encode("utf-8")], dtype=object)
    elif isinstance(value, bool):
        kind, array = "BOOL", np.array([value])
    else:
        kind, array = "INT32", np.array(value, dtype=np.int32)
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor
