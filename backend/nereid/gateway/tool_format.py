"""How models write calls of tools, and the guides that make them do it.

hermes (Hermes, Qwen and many more):  <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>
llama (Llama 3.1 and later):          {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>, joined by ;
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from nereid.gateway.schemas import Function

CALL_OPENS = "<tool_call>"
CALL_CLOSES = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

Json = dict[str, Any]


_MAX_FORCED = 16  # calls in one answer: a weak model might never come to an end


class ToolFormat(Enum):
    """AUTO reads both formats; a call that is forced is then written as in HERMES."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA = "llama"


def forced_guide(tool_format: ToolFormat, functions: Sequence[Function], *, parallel: bool) -> Json:
    """A value for the field `guided_decoding` under which a model can write nothing but calls of `functions`.

    parallel: several calls may follow each other, at most `_MAX_FORCED`. It is a grammar in Lark's notation with JSON
    schemas inside.
    """
    llama = tool_format is ToolFormat.LLAMA
    rules = {
        "start": f"call ({_literal('; ' if llama else chr(10))} call){{0,{_MAX_FORCED - 1}}}" if parallel else "call",
        "call": "body" if llama else f"{_literal(CALL_OPENS + chr(10))} body {_literal(chr(10) + CALL_CLOSES)}",
        "body": f"%json {json.dumps(_calls_schema(functions, 'parameters' if llama else 'arguments'))}",
    }
    return {"grammar": "\n".join(f"{name}: {rule}" for name, rule in rules.items())}


def _literal(text: str) -> str:
    return json.dumps(text)


def _calls_schema(functions: Sequence[Function], arguments: str) -> Json:
    """One call of any of `functions`. Their own schemas become definitions, so that references within them hold."""
    calls = [_call_schema(function, arguments) for function in functions]
    definitions = {function.name: _moved(function.parameters or _NO_ARGUMENTS, function.name) for function in functions}
    # How models are trained to write JSON: one space after a colon and a comma, and no other.
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"x-guidance": spacing, "anyOf": calls, "$defs": definitions}


_NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(function: Function, arguments: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: {"$ref": f"#/$defs/{function.name}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, name: str) -> Any:
    """`schema` with its references into itself as they are once it is `#/$defs/name` of another schema."""
    if isinstance(schema, list):
        return [_moved(item, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, name) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved
