"""GatewayError: an error as OpenAI's clients read it; and what Triton's messages mean in those terms.

| status | type                  | when                                                        |
|--------|-----------------------|-------------------------------------------------------------|
| 400    | invalid_request_error | a field is wrong, unknown or asks for what is not offered   |
| 401    | authentication_error  | no key, or a wrong one                                      |
| 404    | invalid_request_error | no such model, no such path                                 |
| 413    | invalid_request_error | the body is over the limit                                  |
| 499    | cancelled             | the request was cancelled in the server                     |
| 500    | server_error          | a fault                                                     |
| 503    | unavailable_error     | Triton is not there, its queue is full, it is stopping      |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nereid.errors import NereidError, shorten, suggest

RETRY_AFTER_S = 1
_PARAM_CHARS = 64
_CODED = re.compile(
    r"(?P<code>INVALID_ARGUMENT|UNAVAILABLE|CANCELLED|INTERNAL): (?P<said>.*?)(?: \(request id '[^']*'\))?$", re.DOTALL
)
_FIELD = re.compile(r"(?P<field>[a-z][a-z0-9_]*): got ")
_NO_MODEL = re.compile(r"unknown model|is not found", re.IGNORECASE)
_NOT_READY = re.compile(r"is not ready|not at ready state|unloaded|server is (?:not ready|exiting)", re.IGNORECASE)
_STATUSES = {"INVALID_ARGUMENT": 400, "UNAVAILABLE": 503, "CANCELLED": 499, "INTERNAL": 500}
# Pydantic's names for what is wrong -> what is allowed instead, with its own limits filled in.
_ALLOWED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "an object",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_short": "a text of at least 1 character",
    "string_type": "a text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}
UNKNOWN_FIELD = "unknown_field"
"""A type of error beside pydantic's own: its context has the field's `name` and the `known` ones."""

_KINDS = {401: "authentication_error", 499: "cancelled", 500: "server_error", 503: "unavailable_error"}


class GatewayError(NereidError):
    """Ends one HTTP request. status: the HTTP status; param: the field at fault; code: a short name for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self._reason = code

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self._reason}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 503:
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def invalid(field: str, value: object, allowed: str) -> GatewayError:
    """A field that is wrong, in the form that the engine's own errors have."""
    return GatewayError(400, f"{field}: got {shorten(value)}; allowed: {allowed}", param=field, code="invalid_value")


def unknown_field(where: str, name: str, known: Iterable[str]) -> GatewayError:
    """A key `name`, which the object at `where` cannot have; where: empty for the body itself."""
    field = f"{where}.{name}" if where else name
    message = f"unknown field {shorten(field)}{suggest(name, known)}"
    return GatewayError(400, message, param=field[:_PARAM_CHARS], code="unknown_parameter")


def unknown_model(name: str) -> GatewayError:
    return GatewayError(
        404,
        f"the model {shorten(name)} does not exist here; /v1/models lists those that do",
        param="model",
        code="model_not_found",
    )


def not_offered(name: str, reason: str) -> GatewayError:
    """A model that is there, but cannot be asked by the gateway."""
    message = f"the model {shorten(name)} cannot be asked here: {reason}"
    return GatewayError(404, message, param="model", code="model_not_found")


def missing(field: str) -> GatewayError:
    return GatewayError(400, f"{field}: missing; it is required", param=field, code="missing_required_parameter")


def unavailable(message: str) -> GatewayError:
    return GatewayError(503, message, code="unavailable")


def of_validation(error: ValidationError) -> GatewayError:
    """The fault that pydantic found, the innermost of several. An element of a list is written as messages[0].role."""
    found = error.errors(include_url=False)
    first = max(found, key=lambda fault: (fault["type"] == UNKNOWN_FIELD, len(fault["loc"])))
    field, context = _field_at(first["loc"]), first.get("ctx", {})
    if first["type"] == UNKNOWN_FIELD:
        return unknown_field(field, context["name"], context["known"])
    if first["type"] == "missing":
        return missing(field or "body")
    return invalid(field or "body", first["input"], _allowed(first["type"], first["msg"], context))


def _field_at(path: Sequence[int | str]) -> str:
    # What is no field's name says which of several types was tried.
    names = [part for part in path if isinstance(part, int) or (part.isidentifier() and part.islower())]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")


def _allowed(kind: str, said: str, context: Mapping[str, Any]) -> str:
    if kind in _ALLOWED:
        return _ALLOWED[kind].format(**context)
    return said.removeprefix("Value error, ")


def of_triton(message: str) -> GatewayError:
    """What Triton, or the model in it, said in place of an answer."""
    match = _CODED.search(message)
    if match:
        return _of_code(match["code"], match["said"])
    if _NO_MODEL.search(message):
        return GatewayError(404, message, param="model", code="model_not_found")
    return unavailable(message) if _NOT_READY.search(message) else GatewayError(500, message, code="internal")


def of_call(status: str, details: str) -> GatewayError:
    """A gRPC call that failed as a whole. status: the name of its status code."""
    if status == "UNAVAILABLE" and not _CODED.search(details):
        return unavailable(f"the Triton server cannot be reached: {details}")
    if status == "NOT_FOUND":
        return GatewayError(404, details, param="model", code="model_not_found")
    return _of_code("CANCELLED", details) if status == "CANCELLED" else of_triton(details)


def _of_code(code: str, said: str) -> GatewayError:
    field = _FIELD.match(said)
    reason = "invalid_value" if code == "INVALID_ARGUMENT" else code.lower()
    return GatewayError(_STATUSES[code], said, param=field["field"] if field else None, code=reason)
