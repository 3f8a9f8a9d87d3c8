"""RequestParser: what a client sent -> a Request for the engine and how to answer it, or a typed error for it alone.

Pure but for the counter of request ids. Takes plain values (numpy arrays, a dict): no server is needed to test it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereid.errors import InvalidRequestError
from nereid.request import Request, SamplingParams
from nereid.server.parameters import TIMEOUT, Limits, parse_json_object, parse_parameters
from nereid.tokenization.tokenizer import Tokenizer

# Names that mean something to the server, which hands them on among a request's parameters all the same.
_RESERVED = frozenset({"id", "priority", "timeout", "headers", "binary_data_output"})
_RESERVED_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as the server gave it: input tensors by name, request parameters, arrival in monotonic seconds."""

    inputs: Mapping[str, npt.NDArray[np.generic]]
    parameters: Mapping[str, object]
    arrival_time: float


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How a request wants its answer. prefix: what a single response begins with (the prompt, or nothing)."""

    stream: bool
    prefix: str
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    num_input_tokens: int


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose every field is right, but for its prompt's length in tokens: that is known once it is encoded.

    Exactly one of text and token_ids is set.  deadline: monotonic seconds.
    """

    text: str | None
    token_ids: tuple[int, ...] | None
    sampling: SamplingParams
    arrival_time: float
    deadline: float
    stream: bool
    echo: bool
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool


class RequestParser:
    """Checks requests against one model."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, max_model_len: int, *, decoupled: bool) -> None:
        """max_model_len: in tokens.  decoupled: whether the deployment can send more than one response."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * tokenizer.longest_token
        self._decoupled = decoupled
        self._ids = itertools.count(1)

    def check(self, raw: RawRequest) -> CheckedRequest:
        """Everything but the encoding, which may take long. Raises InvalidRequestError."""
        text, token_ids = self._prompt(raw)
        sampling, timeout_ms = parse_parameters(self._given_parameters(raw), self._limits)
        stream = _flag(raw, "stream") or False
        if stream and not self._decoupled:
            raise InvalidRequestError.of_field("stream", True, "false: this model is deployed with decoupled: false")
        exclude = _flag(raw, "exclude_input_in_output")
        if stream and exclude is False:
            raise InvalidRequestError.of_field("exclude_input_in_output", False, "true, or absent, in a stream")
        return CheckedRequest(
            text,
            token_ids,
            sampling,
            arrival_time=raw.arrival_time,
            deadline=raw.arrival_time + timeout_ms / 1e3,
            stream=stream,
            echo=not stream and not exclude,
            return_finish_reason=_flag(raw, "return_finish_reason") or False,
            return_num_input_tokens=_flag(raw, "return_num_input_tokens") or False,
            return_num_output_tokens=_flag(raw, "return_num_output_tokens") or False,
        )

    def encode(self, checked: CheckedRequest) -> tuple[Request, ReplyOptions]:
        """The engine's request, and how to answer it. Raises InvalidRequestError."""
        token_ids = self._encoded(checked)
        text = self._tokenizer.decode(token_ids) if checked.echo and checked.text is None else checked.text
        request = Request(next(self._ids), token_ids, checked.sampling, checked.arrival_time, deadline=checked.deadline)
        return request, ReplyOptions(
            checked.stream,
            (text or "") if checked.echo else "",
            checked.return_finish_reason,
            checked.return_num_input_tokens,
            checked.return_num_output_tokens,
            len(token_ids),
        )

    def _prompt(self, raw: RawRequest) -> tuple[str | None, tuple[int, ...] | None]:
        text, ids = _text(raw, "text_input"), raw.inputs.get("input_ids")
        if (text is None) == (ids is None):
            given = "neither" if text is None else "both"
            raise InvalidRequestError(f"text_input, input_ids: got {given}; allowed: exactly one of the two")
        if text is not None and len(text) > self._max_chars:
            raise InvalidRequestError(
                f"text_input: got {len(text)} characters; allowed: at most max_model_len - 1 = "
                f"{self._max_model_len - 1} tokens, which no text of over {self._max_chars} characters is"
            )
        return text, None if ids is None else self._checked_ids(ids)

    def _encoded(self, checked: CheckedRequest) -> tuple[int, ...]:
        if checked.text is None:
            return checked.token_ids or ()
        token_ids = self._tokenizer.encode(checked.text)
        self._check_length("text_input", len(token_ids))
        # A tokenizer may know more tokens than the model was given (an added padding token, say).
        if (largest := max(token_ids)) >= self._limits.vocab_size:
            token = f"{self._tokenizer.name_of(largest)!r} (id {largest})"
            allowed = f"tokens of the model's vocabulary, ids 0 to {self._limits.vocab_size - 1}"
            raise InvalidRequestError(f"text_input: got the token {token}; allowed: {allowed}")
        return token_ids

    def _check_length(self, field: str, length: int) -> None:
        if length < 1:
            raise InvalidRequestError(f"{field}: got a prompt without tokens; allowed: at least one token")
        if length >= self._max_model_len:
            most = f"{self._max_model_len - 1} tokens (max_model_len {self._max_model_len}, output included)"
            raise InvalidRequestError(f"{field}: got a prompt of {length} tokens; allowed: at most {most}")

    @staticmethod
    def _given_parameters(raw: RawRequest) -> dict[str, object]:
        """sampling_parameters where it is given, else the request's parameters; timeout_ms from either."""
        own = {
            name: value
            for name, value in raw.parameters.items()
            if name not in _RESERVED and not name.startswith(_RESERVED_PREFIX)
        }
        text = _text(raw, "sampling_parameters")
        if text is None:
            return own
        return {TIMEOUT: own.get(TIMEOUT), **parse_json_object("sampling_parameters", text)}

    def _checked_ids(self, ids: npt.NDArray[np.generic]) -> tuple[int, ...]:
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InvalidRequestError.of_field(
                "input_ids", f"{ids.dtype}{list(ids.shape)}", "integers in one dimension"
            )
        self._check_length("input_ids", ids.size)
        token_ids: list[int] = ids.tolist()
        for token_id in token_ids:
            if not 0 <= token_id < self._limits.vocab_size:
                allowed = f"token ids from 0 to {self._limits.vocab_size - 1}"
                raise InvalidRequestError.of_field("input_ids", token_id, allowed)
        return tuple(token_ids)


def _single(raw: RawRequest, name: str) -> object | None:
    """The one element of an input; None where it is absent."""
    array = raw.inputs.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise InvalidRequestError.of_field(name, f"{array.size} elements", "exactly one element")
    value: object = array.reshape(-1)[0]
    return value


def _text(raw: RawRequest, name: str) -> str | None:
    value = _single(raw, name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InvalidRequestError.of_field(name, type(value).__name__, "a STRING tensor")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError.of_field(
            name, value, f"text in UTF-8 ({error.reason} at byte {error.start})"
        ) from error


def _flag(raw: RawRequest, name: str) -> bool | None:
    value = _single(raw, name)
    if value is None or isinstance(value, (bool, np.bool_)):
        return None if value is None else bool(value)
    raise InvalidRequestError.of_field(name, value, "a BOOL tensor")
