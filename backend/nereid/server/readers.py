"""Readers: one value as a client wrote it -> the value that is meant, or an error that names the field. Pure functions.

Numbers and truth values may be spelled as texts, since many clients send them so; lists and objects may be JSON texts.
What a reader returns has been checked as far as it can be without the model and without the other fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from nereid.errors import InvalidRequestError, shorten

Reader = Callable[[str, object], Any]

MAX_ITEMS = 1024  # of a list
MAX_VALUES = 100_000  # in one JSON text: each costs time in which no other request is read
_MAX_JSON_CHARS = 1 << 23  # parsing takes the server's thread a tenth of a second, about
_MAX_TEXTS = 64
_MAX_TEXT_CHARS = 1024
_BOOLEANS = {True: True, False: False, "true": True, "false": False, "True": True, "False": False}


def integer(low: int, high: int | None = None) -> Reader:
    """A whole number, however it is spelled: 7, 7.0, "7"."""
    allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def read(name: str, value: object) -> int:
        number = as_number(value)
        if number is None or number != math.floor(number) or number < low or (high is not None and number > high):
            raise InvalidRequestError.of_field(name, value, allowed)
        return int(number)

    return read


def real(low: float, high: float) -> Reader:
    """A finite number."""
    allowed = f"a number from {low:g} to {high:g}"

    def read(name: str, value: object) -> float:
        number = as_number(value)
        if number is None or not low <= number <= high:
            raise InvalidRequestError.of_field(name, value, allowed)
        return float(number)

    return read


def as_number(value: object) -> int | float | None:
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


def boolean(name: str, value: object) -> bool:
    if isinstance(value, (bool, str)) and value in _BOOLEANS:
        return _BOOLEANS[value]
    raise InvalidRequestError.of_field(name, value, "true or false")


def text(max_chars: int | None = None) -> Reader:
    """A text of Unicode."""
    allowed = "a text of Unicode" if max_chars is None else f"a text of at most {max_chars} characters of Unicode"

    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or (max_chars is not None and len(value) > max_chars) or not is_unicode(value):
            raise InvalidRequestError.of_field(name, value, allowed)
        return value

    return read


def any_text(name: str, value: object) -> str:
    """A text that is checked elsewhere."""
    if not isinstance(value, str):
        raise InvalidRequestError.of_field(name, value, "a text")
    return value


def texts(name: str, value: object) -> tuple[str, ...]:
    """A text or a list of texts, each once. Empty texts say nothing and are left out: clients send "" for "none"."""
    return tuple(item for item in dict.fromkeys(words(name, value)) if item)


def words(name: str, value: object) -> tuple[str, ...]:
    """A text or a list of texts, as they are."""
    found = [value] if isinstance(value, str) else value
    allowed = f"a text or at most {_MAX_TEXTS} texts, each of at most {_MAX_TEXT_CHARS} characters of Unicode"
    if not isinstance(found, list) or len(found) > _MAX_TEXTS:
        raise InvalidRequestError.of_field(name, value, allowed)
    for item in found:
        if not isinstance(item, str) or len(item) > _MAX_TEXT_CHARS or not is_unicode(item):
            raise InvalidRequestError.of_field(name, item, allowed)
    return tuple(found)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A list of whole numbers, each once, in its order."""
    items = as_list(name, value, f"a list of at most {MAX_ITEMS} token ids")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidRequestError.of_field(name, item, "a list of token ids")
    return tuple(dict.fromkeys(items))


def numbers(name: str, value: object) -> tuple[float, ...]:
    """A list of finite numbers."""
    allowed = f"a list of at most {MAX_ITEMS} numbers"
    found = [as_number(item) for item in as_list(name, value, allowed)]
    if None in found:
        raise InvalidRequestError.of_field(name, value, allowed)
    return tuple(float(number) for number in found if number is not None)


def as_list(name: str, value: object, allowed: str) -> list[Any]:
    """The list, of at most MAX_ITEMS, that `value` is or spells in JSON."""
    found = parse_json(name, value, allowed) if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > MAX_ITEMS:
        raise InvalidRequestError.of_field(name, value, allowed)
    return found


def json_list(name: str, value: object) -> list[Any]:
    return as_list(name, value, f"a JSON list of at most {MAX_ITEMS} items")


def json_object(name: str, value: object) -> dict[str, Any]:
    """The object that `value` is or spells in JSON."""
    allowed = "a JSON object"
    found = parse_json(name, value, allowed) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise InvalidRequestError.of_field(name, value, allowed)
    return found


def parse_json(name: str, source: str, allowed: str) -> Any:
    """What `source` spells. Raises InvalidRequestError where it is no JSON: NaN and Infinity are none."""
    if len(source) > _MAX_JSON_CHARS:
        raise InvalidRequestError(f"{name}: got {len(source)} characters; allowed: at most {_MAX_JSON_CHARS} of JSON")
    try:
        found = json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"{name}: got {shorten(source)}; allowed: {allowed} ({reason})") from error
    if not _has_at_most(MAX_VALUES, found):
        raise InvalidRequestError(f"{name}: got JSON of more values; allowed: at most {MAX_VALUES} in all")
    return found


def _has_at_most(count: int, value: object) -> bool:
    """Whether `value` holds no more values than that, at any depth."""
    left = [value]
    while left and count > 0:
        count -= 1
        item = left.pop()
        if isinstance(item, (list, dict)):
            left.extend(item.values() if isinstance(item, dict) else item)
            if len(left) > count:
                return False
    return not left


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """An object of token ids and what is added to their logits, as pairs."""
    allowed = f"at most {MAX_ITEMS} token ids with a number from -100 to 100 each, as a JSON object"
    found = parse_json(name, value, allowed) if isinstance(value, str) else value
    if not isinstance(found, dict) or len(found) > MAX_ITEMS:
        raise InvalidRequestError.of_field(name, value, allowed)
    read: dict[int, float] = {}
    for key, given in found.items():
        token_id, bias = as_number(key), as_number(given)
        if not isinstance(token_id, int) or bias is None or not -100 <= bias <= 100:
            raise InvalidRequestError.of_field(name, {key: given}, allowed)
        read[token_id] = float(bias)
    return tuple(read.items())


def anything(name: str, value: object) -> object:
    """A value that has a reader of its own elsewhere."""
    return value


def truncation(name: str, value: object) -> int:
    """A number of tokens, or -1."""
    count: int = integer(-1)(name, value)
    if count == 0:
        raise InvalidRequestError.of_field(name, value, "a whole number of at least 1, or -1")
    return count


# Fields of other engines of which only the neutral value is offered: `why` is what a refusal goes on with.


def only(allowed: float, why: str) -> Reader:
    def read(name: str, value: object) -> float:
        if as_number(value) != allowed:
            raise InvalidRequestError.of_field(name, value, f"{allowed} ({why})")
        return allowed

    return read


def only_false(why: str) -> Reader:
    def read(name: str, value: object) -> bool:
        if boolean(name, value):
            raise InvalidRequestError.of_field(name, value, f"false ({why})")
        return False

    return read


def only_true(why: str) -> Reader:
    def read(name: str, value: object) -> bool:
        if not boolean(name, value):
            raise InvalidRequestError.of_field(name, value, f"true ({why})")
        return True

    return read


def never(why: str) -> Reader:
    def read(name: str, value: object) -> object:
        raise InvalidRequestError.of_field(name, value, f"no value ({why})")

    return read


def is_unicode(value: str) -> bool:
    """Whether `value` can be sent: a lone surrogate, which JSON can spell, is no character."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
