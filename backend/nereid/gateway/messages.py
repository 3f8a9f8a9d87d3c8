"""OpenAI's messages and tools -> what a model's chat template takes. Pure.

Templates are written for plain texts and for arguments as objects. So: a content of parts becomes their texts, a line
each; null becomes an empty text; a call's arguments, which OpenAI writes as JSON in a text, become the object that it
holds; the role `developer` becomes `system`. What a template cannot take (images, sound, files) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from nereid.gateway.errors import invalid
from nereid.gateway.schemas import Tool

_ROLES = {name: name for name in ("system", "user", "assistant", "tool", "function")} | {"developer": "system"}
_DROPPED = frozenset({"refusal", "annotations"})  # what clients send back of an answer, and no template knows

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
    kept = {name: value for name, value in message.items() if value is not None and name not in _DROPPED}
    made: Json = {**kept, "role": _ROLES[role], "content": _content(f"{where}.content", message.get("content"))}
    if "tool_calls" in kept:
        made["tool_calls"] = _calls(f"{where}.tool_calls", kept["tool_calls"])
    return made


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
    text = part.get(kind)
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
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """The object that they spell. What spells none stays as the model once wrote it."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = from_json(arguments or "{}")
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
