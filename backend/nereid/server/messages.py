"""Chat messages as clients write them -> a Conversation for the chat template, or an error that names the place.

Pure functions. Contents become texts, and a call's arguments become an object, since that is what templates expect:
clients send back what they were answered, with a content of null beside calls, and null for what was not answered. All
else of a message is handed on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from nereid.errors import InvalidRequestError
from nereid.server.readers import as_list
from nereid.tokenization.chat_encoder import Conversation

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_CALLS = ("tool_calls", "function_call")  # what an assistant may say in place of a content
# What a conversation itself says: a variable must not.
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self")


def read_conversation(fields: Mapping[str, Any]) -> Conversation:
    """The conversation of a request that has `messages`. Raises InvalidRequestError."""
    messages = as_list("messages", fields["messages"], "a JSON list of 1 to 1024 messages")
    if not messages:
        raise InvalidRequestError.of_field("messages", [], "at least one message")
    goes_on = fields.get("continue_final_message", False)
    add_prompt = fields.get("add_generation_prompt", not goes_on)
    if goes_on and add_prompt:
        raise InvalidRequestError.of_field("add_generation_prompt", True, "false, with continue_final_message")
    variables = fields.get("chat_template_kwargs", {})
    for name in variables:
        if name in _OWN_VARIABLES or name.endswith("_token"):
            allowed = "variables that are neither fields of a request nor control tokens"
            raise InvalidRequestError.of_field("chat_template_kwargs", name, allowed)
    read = [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]
    if goes_on and not read[-1]["content"]:
        raise InvalidRequestError.of_field(
            "continue_final_message", True, "false, where the last message has no content"
        )
    return Conversation(read, fields.get("tools"), variables, add_prompt, goes_on)


def size_of(messages: object) -> int:
    """How many characters there are in them, as JSON text or as a list, about."""
    size, left = 0, [messages]
    while left:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, (list, dict)):
            left.extend(value.values() if isinstance(value, dict) else value)
    return size


def _message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError.of_field(place, message, "an object with role and content")
    if message.get("role") not in _ROLES:
        raise InvalidRequestError.of_field(f"{place}.role", message.get("role"), ", ".join(_ROLES))
    read = {name: value for name, value in message.items() if value is not None}
    if (calls := read.get("tool_calls")) is not None:
        read["tool_calls"] = [_call(f"{place}.tool_calls", call) for call in _calls(f"{place}.tool_calls", calls)]
    if "content" in read:
        read["content"] = _content(f"{place}.content", read["content"])
    elif read["role"] == "assistant" and any(read.get(name) for name in _CALLS):
        read["content"] = ""
    else:
        allowed = f"a text; none is needed where the assistant has {' or '.join(_CALLS)}"
        raise InvalidRequestError.of_field(f"{place}.content", None, allowed)
    return read


def _content(place: str, content: object) -> str:
    """The text; that of several parts is joined by line ends."""
    if isinstance(content, str):
        return content
    allowed = 'a text, or a list of parts {"type": "text", "text": ...}'
    if not isinstance(content, list):
        raise InvalidRequestError.of_field(place, content, allowed)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError.of_field(place, part, allowed)
    return "\n".join(part["text"] for part in content)


def _calls(place: str, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequestError.of_field(place, calls, "a list of calls")
    return calls


def _call(place: str, call: object) -> dict[str, Any]:
    """A call whose arguments are an object, where they are the JSON text of one."""
    if not isinstance(call, dict):
        raise InvalidRequestError.of_field(place, call, "objects")
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return call


def _arguments(said: object) -> object:
    """The object that they spell; none are an empty one. What spells none stays as the model once wrote it."""
    if said is None or said == "":
        return {}
    if isinstance(said, str):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(read := json.loads(said), dict):
                return read
    return said
