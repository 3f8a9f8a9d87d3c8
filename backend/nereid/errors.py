"""The exception tree: every error that Nereid raises on purpose, each with the code a client sees.

    NereidError
    |-- ConfigError             INVALID_ARGUMENT   a setting of the deployment is wrong
    |-- ModelLoadError          INVALID_ARGUMENT   the model's files are missing, damaged or not supported
    |-- PackageError            INTERNAL           a package could not be fetched or unpacked
    |-- ServerError             INTERNAL           the server did not start, or ended by itself
    |-- RequestError            ends one request and no other
    |   |-- InvalidRequestError     INVALID_ARGUMENT   names the field, its value and what is allowed
    |   |-- QueueFullError          UNAVAILABLE        the waiting queue is at its limit
    |   |-- QueueTimeoutError       UNAVAILABLE        waited too long to be scheduled
    |   |-- RequestCancelledError   CANCELLED          the client cancelled or left
    |   |-- GuideError              INVALID_ARGUMENT   the request's guide cannot go on
    |   |-- NoTokenError            INVALID_ARGUMENT   what the request asks for leaves no token to draw
    |   `-- NumericsError           INTERNAL           the model gave NaN for this request
    `-- EngineError             ends every request
        |-- EngineDeadError         UNAVAILABLE        the loop thread or the executor died
        |-- EngineStoppedError      UNAVAILABLE        the engine is draining or has stopped
        `-- ExecutorError           INTERNAL           a step failed behind the executor seam

Nothing here imports anything of Nereid; anything of Nereid may import this.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import ClassVar

_VALUE_CHARS = 120
_NAME_CHARS = 64
_ALIKE = 0.75  # below, names that mean something else are taken for slips of typing
_MAX_LISTED = 12


class ErrorCode(Enum):
    """Triton's error codes, by the names that its Python backend gives them."""

    INVALID_ARGUMENT = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class NereidError(Exception):
    """Root of the tree. `code` is what the server answers with."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL


class ConfigError(NereidError):
    """A setting is unknown, of the wrong type or out of range."""

    code = ErrorCode.INVALID_ARGUMENT


class ModelLoadError(NereidError):
    """The model cannot be loaded; the message names the file or the setting."""

    code = ErrorCode.INVALID_ARGUMENT


class PackageError(NereidError):
    """A package could not be fetched or unpacked; the message says why and names pip's log."""


class ServerError(NereidError):
    """The server did not start, or ended by itself; the message gives its own reason."""


class RequestError(NereidError):
    """Ends one request; its batch mates never notice."""


class InvalidRequestError(RequestError):
    """A request asks for what cannot be done."""

    code = ErrorCode.INVALID_ARGUMENT

    @classmethod
    def of_field(cls, field: str, value: object, allowed: str) -> InvalidRequestError:
        """The error in the one form that all field errors have: field, value (shortened), what is allowed."""
        return cls(f"{field}: got {shorten(value)}; allowed: {allowed}")


class QueueFullError(RequestError):
    """The waiting queue is at `max_queue_size`."""

    code = ErrorCode.UNAVAILABLE


class QueueTimeoutError(RequestError):
    """The request was not scheduled within `queue_timeout_ms`."""

    code = ErrorCode.UNAVAILABLE


class RequestCancelledError(RequestError):
    """The client cancelled the request, or is gone."""

    code = ErrorCode.CANCELLED


class GuideError(RequestError):
    """No token can follow in the request's guide, or following it takes more than the library allows."""

    code = ErrorCode.INVALID_ARGUMENT

    def __init__(self, reason: str) -> None:
        super().__init__(f"the guide cannot go on: {reason}")


class NoTokenError(RequestError):
    """Masks, biases and penalties leave no token that could be drawn."""

    code = ErrorCode.INVALID_ARGUMENT


class NumericsError(RequestError):
    """The model's logits for this request hold NaN."""


class EngineError(NereidError):
    """Ends every request, present and later."""

    code = ErrorCode.UNAVAILABLE


class EngineDeadError(EngineError):
    """The engine cannot go on; the server must load the model again."""


class EngineStoppedError(EngineError):
    """The engine takes no more requests, or stopped before this one was done."""

    def __init__(self) -> None:
        super().__init__("the model is being unloaded or the server is stopping")


class ExecutorError(EngineError):
    """A step failed or ran past its deadline; the executor is not used again."""

    code = ErrorCode.INTERNAL


def shorten(value: object, limit: int = _VALUE_CHARS) -> str:
    """`repr(value)` cut to about `limit` characters, safe to send (no lone surrogates, no megabytes)."""
    if isinstance(value, (str, bytes)):
        value = value[: limit + 1]
    try:
        text = repr(value).encode("utf-8", "backslashreplace").decode("utf-8")
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "..."


def suggest(name: str, known: Iterable[str]) -> str:
    """How a message about an unknown name goes on: the known name that it resembles, or else all known names where
    they are few, or else not at all."""
    names = sorted(known)
    if close := difflib.get_close_matches(name[:_NAME_CHARS], names, n=1, cutoff=_ALIKE):
        return f" (did you mean '{close[0]}'?)"
    return f"; known: {', '.join(names)}" if len(names) <= _MAX_LISTED else ""
