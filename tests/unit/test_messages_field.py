"""Chat messages as a request's prompt: every accepted form, every refusal by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nereid.errors import InvalidRequestError
from nereid.server.messages import read_conversation, size_of

USER = {"role": "user", "content": "hi"}


def read(messages: Any, **fields: Any) -> Any:
    return read_conversation({"messages": messages, **fields})


def test_messages_come_as_json_or_as_a_list() -> None:
    for value in ([USER], json.dumps([USER])):
        conversation = read(value, tools=[{"type": "function"}], chat_template_kwargs={"enable_thinking": False})
        assert conversation.messages == [USER] and conversation.tools == [{"type": "function"}]
        assert conversation.variables == {"enable_thinking": False} and conversation.add_generation_prompt


def test_parts_are_joined_and_arguments_become_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}, {"function": {"arguments": "{"}}]
    first, second = read([{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": calls}]).messages
    assert first["content"] == "a\nb" and second["content"] == ""
    assert [call["function"]["arguments"] for call in second["tool_calls"]] == [{"x": 1}, "{"]
    assert calls[0]["function"]["arguments"] == '{"x": 1}'  # type: ignore[index]  # what came is left as it is


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_no_content_beside_calls_is_an_empty_text(content: dict[str, Any]) -> None:
    for calls in ({"tool_calls": [{"function": {"name": "f"}}]}, {"function_call": {"name": "f", "arguments": "{}"}}):
        (message,) = read([{"role": "assistant", **content, **calls}]).messages
        assert message["content"] == ""


def test_null_in_a_message_is_not_given() -> None:
    answered = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "function_call": None}
    assert read([answered]).messages == [{"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}])
def test_a_call_without_arguments_has_an_empty_object_of_them(arguments: dict[str, Any]) -> None:
    (message,) = read([{"role": "assistant", "tool_calls": [{"function": {"name": "f", **arguments}}]}]).messages
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


def test_going_on_with_a_message_asks_for_no_generation_prompt() -> None:
    conversation = read([USER], continue_final_message=True)
    assert conversation.continue_final_message and not conversation.add_generation_prompt


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        ([], {}, r"messages: got \[\]; allowed: at least one message"),
        ("{}", {}, "messages: got .* JSON list"),
        ("[", {}, "messages: got .* JSON list"),
        ("[" * 100_000, {}, "messages: .*too deeply nested"),
        (["hi"], {}, r"messages\[0\]: got 'hi'; allowed: an object"),
        ([{"content": "x"}], {}, r"messages\[0\].role: got None; allowed: system, developer"),
        ([USER, {"role": "root", "content": "x"}], {}, r"messages\[1\].role: got 'root'"),
        ([{"role": "user"}], {}, r"messages\[0\].content: got None"),
        ([{"role": "user", "tool_calls": [{"function": {}}]}], {}, r"messages\[0\].content: got None"),
        ([{"role": "tool", "content": None}], {}, r"messages\[0\].content: got None; allowed: a text"),
        ([{"role": "assistant", "content": None}], {}, r"messages\[0\].content: got None"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], {}, r"messages\[0\].content: got None"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\].content: got 5"),
        ([{"role": "user", "content": ["x"]}], {}, r"messages\[0\].content: got 'x'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, r"messages\[0\].content: got .*image_url"),
        ([{"role": "assistant", "tool_calls": 5}], {}, r"messages\[0\].tool_calls: got 5"),
        ([{"role": "assistant", "tool_calls": [5]}], {}, r"messages\[0\].tool_calls: got 5"),
        ([USER], {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt: got True"),
        ([USER], {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: got 'messages'"),
        ([USER], {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs: got 'bos_token'"),
        ([{"role": "user", "content": ""}], {"continue_final_message": True}, "continue_final_message: got True"),
        ([USER] * 1025, {}, "messages: got .* 1 to 1024"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_place(messages: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(messages, **fields)


def test_the_size_is_that_of_all_texts() -> None:
    assert size_of("x" * 9) == 9
    assert size_of([USER, {"role": "user", "content": [{"type": "text", "text": "abc"}]}]) == 6 + 4 + 4 + 3
