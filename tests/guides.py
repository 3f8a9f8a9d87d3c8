"""Twenty bounded schemas for the tests of guided decoding, and judges of what was written under them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np

from nereid.guided.library import CompiledGuide
from nereid.guided.masks import num_words
from nereid.guided.matcher import GuideMatcher
from nereid.request import Guide, GuideKind

Allowed = list[int]


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {"type": "object", "required": list(properties), "additionalProperties": False}
    return {**closed, "properties": properties, **more}


_INT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}
_WORD: dict[str, Any] = {"type": "string", "maxLength": 12}
_BOOL: dict[str, Any] = {"type": "boolean"}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _object({"name": _WORD, "age": _INT}),
    "enum": _object({"color": {"enum": ["red", "green", 1, 2.5, None, True, {"a": [1]}]}}),
    "const": _object({"v": {"const": {"x": [1, 2, "é"]}}}),
    "unicode": _object({"имя": {"enum": ["Ünïcödé", "日本語", "🙂", 'a"b\\c']}, "ключ": _WORD}),
    "array": {"type": "array", "items": _INT, "minItems": 2, "maxItems": 5},
    "array_of_objects": {
        "type": "array", "maxItems": 3,
        "items": _object({"id": _INT, "tags": {"type": "array", "items": _WORD, "maxItems": 3}}),
    },
    "tuple": {"type": "array", "prefixItems": [_INT, _WORD, _BOOL], "items": False, "minItems": 3},
    "nested": _object({"a": _object({"b": _object({"c": _object({"d": _object({"e": _INT})})})})}),
    "numbers": _object({"lat": {"type": "number", "minimum": -90, "maximum": 90}, "port": {**_INT, "maximum": 65535}}),
    "multiples": _object({"m": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}}),
    "pattern": _object({"code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}),
    "formats": _object({"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}),
    "any_of": _object({"v": {"anyOf": [_INT, _WORD, {"type": "array", "items": _BOOL, "maxItems": 2}]}}),
    "one_of": _object(
        {"v": {"oneOf": [_object({"k": {"const": "a"}, "x": _INT}), _object({"k": {"const": "b"}, "y": _WORD})]}}
    ),
    "all_of": _object({"v": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]}, "w": {"allOf": [_WORD]}}),
    "recursive": {
        "$defs": {"tree": _object({"v": _INT, "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}}),
                  "leaf": _object({"v": _INT})},
        "$ref": "#/$defs/tree",
    },
    "optional": _object({f"p{i}": _INT for i in range(6)}, required=["p3"]),
    "min_length": _object({"s": {"type": "string", "minLength": 3, "maxLength": 6}}),
    "matrix": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "array", "items": _INT, "maxItems": 3}},
    "person": _object(
        {"name": _WORD, "married": _BOOL,
         "children": {"type": "array", "items": _object({"name": _WORD}), "maxItems": 2},
         "email": {"type": ["string", "null"], "maxLength": 20}}
    ),
}  # fmt: skip


def schema_guide(name: str) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMAS[name]))


def assert_valid(text: str, schema: Any) -> None:
    """Raises jsonschema's error where the text is no instance."""
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


def allowed_tokens(matcher: GuideMatcher, vocab_size: int) -> Allowed:
    row = np.zeros(num_words(vocab_size), np.int32)
    matcher.fill(row)
    allowed: Allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return allowed


def walk(
    guide: CompiledGuide,
    vocab_size: int,
    eos: int,
    rng: random.Random,
    max_tokens: int = 400,
    wants: Callable[[int], bool] = lambda token: True,
) -> tuple[list[int], bool]:
    """Random allowed tokens up to the end, and whether it came; `wants`: which are taken where there is a choice."""
    matcher = guide.matcher()
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        allowed = allowed_tokens(matcher, vocab_size)
        if eos in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return tokens, True
        choice = [token for token in allowed if token != eos]
        token = rng.choice([token for token in rng.sample(choice, min(50, len(choice))) if wants(token)] or choice)
        assert matcher.accept([token])
        tokens.append(token)
        if matcher.is_complete:
            return tokens, True
    return tokens, False  # fmt: skip
