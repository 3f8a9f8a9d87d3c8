"""Sampling parameters as clients write them -> SamplingParams, or an error that names the field. Pure functions.

Numbers may come as strings, since many clients send them so. A name that is not known here is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid.errors import InvalidRequestError, shorten, suggest
from nereid.request import SamplingParams

TIMEOUT = "timeout_ms"
_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_MAX_STOP_IDS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What the values are checked against, and the defaults of a deployment."""

    vocab_size: int
    default_max_tokens: int
    default_timeout_ms: int


def parse_parameters(given: Mapping[str, object], limits: Limits) -> tuple[SamplingParams, int]:
    """Sampling parameters, and the request's deadline in milliseconds after its arrival.

    null stands for "not given". Raises InvalidRequestError.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _READERS:
            raise InvalidRequestError(f"unknown parameter {shorten(name)}{suggest(name, _READERS)}")
        if value is not None:
            values[name] = _READERS[name](name, value)
    timeout_ms = values.pop(TIMEOUT, limits.default_timeout_ms)
    values.setdefault("max_tokens", limits.default_max_tokens)
    values.setdefault("seed", secrets.randbits(63))
    params = SamplingParams(**values)
    _check_together(params, limits)
    return params, timeout_ms


def parse_json_object(field: str, text: str) -> dict[str, object]:
    """The JSON object in `text`. Raises InvalidRequestError for anything else, NaN and Infinity among it."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"{field}: got {shorten(text)}; allowed: a JSON object ({reason})") from error
    if not isinstance(value, dict):
        raise InvalidRequestError.of_field(field, text, "a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_together(params: SamplingParams, limits: Limits) -> None:
    if params.min_tokens > params.max_tokens:
        allowed = f"at most max_tokens ({params.max_tokens})"
        raise InvalidRequestError.of_field("min_tokens", params.min_tokens, allowed)
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < limits.vocab_size:
            allowed = f"token ids from 0 to {limits.vocab_size - 1}"
            raise InvalidRequestError.of_field("stop_token_ids", token_id, allowed)


def _integer(low: int, high: int | None = None) -> Callable[[str, object], int]:
    allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def read(name: str, value: object) -> int:
        number = _number(value)
        if number is None or number != math.floor(number) or number < low or (high is not None and number > high):
            raise InvalidRequestError.of_field(name, value, allowed)
        return int(number)

    return read


def _real(low: float, high: float) -> Callable[[str, object], float]:
    def read(name: str, value: object) -> float:
        number = _number(value)
        if number is None or not low <= number <= high:
            raise InvalidRequestError.of_field(name, value, f"a number from {low:g} to {high:g}")
        return float(number)

    return read


def _number(value: object) -> int | float | None:
    """The finite number that `value` is or spells; None where it is none."""
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().lstrip("+-").isascii() and _is_digits(value) else float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _is_digits(text: str) -> bool:
    digits = text.strip().lstrip("+-")
    return digits.isdigit() and len(digits) <= 40


def _boolean(name: str, value: object) -> bool:
    known = {True: True, False: False, "true": True, "false": False, "True": True, "False": False}
    if isinstance(value, (bool, str)) and value in known:
        return known[value]
    raise InvalidRequestError.of_field(name, value, "true or false")


def _stops(name: str, value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    allowed = f"a text or at most {_MAX_STOPS} texts, each of 1 to {_MAX_STOP_CHARS} characters of Unicode"
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise InvalidRequestError.of_field(name, value, allowed)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _MAX_STOP_CHARS or not is_unicode(stop):
            raise InvalidRequestError.of_field(name, stop, allowed)
    return tuple(stops)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):  # then it is no list, which is refused below
            value = json.loads(value)
    if not isinstance(value, list) or len(value) > _MAX_STOP_IDS:
        raise InvalidRequestError.of_field(name, value, f"a list of at most {_MAX_STOP_IDS} token ids")
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError.of_field(name, token_id, "a list of token ids")
    return tuple(dict.fromkeys(value))


def is_unicode(text: str) -> bool:
    """Whether `text` can be sent: a lone surrogate, which JSON can spell, is no character."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "temperature": _real(0.0, 1e6),
    "top_k": _integer(-1),
    "top_p": _real(0.0, 1.0),
    "min_p": _real(0.0, 1.0),
    "seed": _integer(-(1 << 63), (1 << 64) - 1),
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "stop": _stops,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    TIMEOUT: _integer(1, 1 << 40),
}
