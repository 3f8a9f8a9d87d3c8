"""What the answers to both kinds of requests have in common: ids, usage, reasons, and the fields every model gets."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from nereid.gateway.errors import GatewayError
from nereid.gateway.pieces import Piece
from nereid.gateway.schemas import ChatRequest, CompletionRequest
from nereid.gateway.triton import Model

# A deadline that is over ends a text before its time, as a limit of tokens does: clients know no third word for it.
_FINISH_REASONS = {"timeout": "length"}
_COUNTS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_num_cached_tokens")
TO_THE_END = (1 << 31) - 1
"""max_tokens where the request sets none: the engine cuts it to the room that the context leaves."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What each object of one answer repeats. kind: its `object`; created: seconds since 1970."""

    id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, **fields: object) -> dict[str, object]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, **fields}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts and answers of one request, counted from the pieces."""

    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _generated: int = 0

    def add(self, number: int, piece: Piece) -> None:
        """number: which of the request's prompts the piece answers."""
        if piece.num_input_tokens is not None:
            self._prompts[number] = piece.num_input_tokens
        if piece.num_cached_tokens is not None:
            self._cached[number] = piece.num_cached_tokens
        self._generated += piece.num_output_tokens

    @property
    def json(self) -> dict[str, object]:
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._generated,
            "total_tokens": prompt + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def finish_reason_of(piece: Piece) -> str | None:
    """OpenAI's word for why the answer ended; None where it goes on."""
    return None if piece.finish_reason is None else _FINISH_REASONS.get(piece.finish_reason, piece.finish_reason)


def switches(*further: str) -> dict[str, bool]:
    """The input tensors that ask for outputs: the counts, and `further`."""
    return dict.fromkeys((*_COUNTS, *further), True)


def check_offered(model: Model, tensor: str, field_name: str) -> None:
    """Raises GatewayError where the model does not take the input `tensor`, without which the field is not offered."""
    if tensor not in model.inputs:
        message = f"{field_name}: the model {model.name!r} does not offer it (it has no input {tensor!r})"
        raise GatewayError(400, message, param=field_name, code="not_offered")


def check_sequences(model: Model, body: ChatRequest | CompletionRequest) -> None:
    """Raises GatewayError where a stream of several sequences is asked of a model that does not say which is which."""
    if body.n > 1:
        check_offered(model, "return_sequence_index", "n")
