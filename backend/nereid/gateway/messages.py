"""OpenAI's messages and tools -> what a model's chat template takes. Pure.

Templates are written for plain texts and for arguments as objects. So: a content of parts becomes their texts, a line
each; null becomes an empty text; a call's arguments, which OpenAI writes as JSON in a text, become the object that it
holds; the role `developer` becomes `system`. What a template cannot take (images, sound, files) is refused, and so
is a key that means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic_core import from_json

from nereid.gateway.errors import invalid, missing, unknown_field
from nereid.gateway.schemas import Tool

_ROLES = {name: name for name in ("system", "user", "assistant", "tool", "function")} | {"developer": "system"}
_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"})
_DROPPED = frozenset({"refusal", "annotations", "parsed"})  # what clients send back of an answer, and no template knows
_NOT_OFFERED = {"audio": "null (sound is not offered)", "function_call": "null; a call belongs into tool_calls"}
_PART_KEYS = frozenset({"type", "text", "refusal", "annotations", "cache_control"})
_CALL_KEYS = frozenset({"id", "type", "function", "index"})
_FUNCTION_KEYS = frozenset({"name", "arguments", "parsed_arguments"})

Json = dict[str, Any]


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Raises GatewayError that names the message at fault."""
    return [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def template_tools(tools: Sequence[Tool]) -> list[Json]:
    """The declared tools, without what the client left out."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _message(where: str, message: Mapping[str, Any]) -> Json:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", role, ", ".join(_ROLES))
    given = _given(where, message, _KNOWN | _DROPPED | _NOT_OFFERED.keys())
    for name in _NOT_OFFERED.keys() & given.keys():
        raise invalid(f"{where}.{name}", given[name], _NOT_OFFERED[name])
    # The assistant may have said nothing.
    if "content" not in (message if role == "assistant" else given) and not {"tool_calls", "refusal"} & given.keys():
        raise missing(f"{where}.content")
    kept = {name: value for name, value in given.items() if name not in _DROPPED}
    made: Json = {**kept, "role": _ROLES[role], "content": _content(f"{where}.content", kept.get("content"))}
    if "tool_calls" in kept:
        made["tool_calls"] = _calls(f"{where}.tool_calls", kept["tool_calls"])
    return made


def _given(where: str, values: Mapping[str, Any], known: Set[str]) -> Json:
    """`values` without those that are null, which stands for "not given"."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in known:
            raise unknown_field(where, name, known)
    return given


def _content(where: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(where, content, "a text or a list of parts")
    return "\n".join(_part(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise invalid(f"{where}.type", kind, "text (images, sound and files are not offered)")
    text = _given(where, part, _PART_KEYS).get(kind)
    if not isinstance(text, str):
        raise invalid(f"{where}.{kind}", text, "a text")
    return text


def _calls(where: str, calls: object) -> list[Json]:
    if not isinstance(calls, list):
        raise invalid(where, calls, "a list of calls")
    return [_call(f"{where}[{number}]", call) for number, call in enumerate(calls)]


def _call(where: str, call: object) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, call, "an object with function.name and function.arguments")
    named = _given(f"{where}.function", function, _FUNCTION_KEYS)
    arguments = _arguments(named.get("arguments"))
    return {**_given(where, call, _CALL_KEYS), "function": {"name": named["name"], "arguments": arguments}}


def _arguments(arguments: object) -> object:
    """The object that they spell. What spells none stays as the model once wrote it."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = from_json(arguments or "{}")
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
