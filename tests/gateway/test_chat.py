"""Chats by the official client. What is sent on, and what is made of an answer, is seen on a model that says what it
is told, behind the real server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

USER = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def script(**orders: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": json.dumps(orders)}]


def ask(client: openai.OpenAI, messages: Any, **fields: Any) -> ChatCompletion:
    made: ChatCompletion = client.chat.completions.create(model="says", messages=messages, **fields)
    return made


def ask_stream(client: openai.OpenAI, messages: Any, **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(model="says", messages=messages, stream=True, **fields))


def inputs(client: openai.OpenAI, messages: list[Any] | None = None, **fields: Any) -> tuple[dict[str, Any], Any, Any]:
    """All that the model was given, and of that: its sampling parameters, its messages."""
    made = ask(client, [*(messages or []), *script(inputs=True)], **fields)
    given = json.loads(made.choices[0].message.content or "")
    return given, json.loads(given["sampling_parameters"][0]), json.loads(given["messages"][0])


def test_answer_and_its_usage(client: openai.OpenAI) -> None:
    made = ask(client, script(say=["Good", " day", "."]))
    assert made.object == "chat.completion" and made.id.startswith("chatcmpl-")
    choice = made.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Good day.", "stop")
    assert choice.message.tool_calls is None and choice.logprobs is None
    assert made.usage is not None and made.usage.prompt_tokens_details is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (11, 3, 14)
    assert made.usage.prompt_tokens_details.cached_tokens == 8


def test_stream(client: openai.OpenAI) -> None:
    *chunks, usage = ask_stream(client, script(say=["Gööd", " day"]), stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [delta.content for delta in deltas[1:]] == ["Gööd", " day", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(("reason", "shown"), [("stop", "stop"), ("length", "length"), ("timeout", "length")])
def test_finish_reasons(client: openai.OpenAI, reason: str, shown: str) -> None:
    assert ask(client, script(finish=reason)).choices[0].finish_reason == shown
    assert ask_stream(client, script(finish=reason))[-1].choices[0].finish_reason == shown


def test_what_the_model_is_given(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    given, sampling, _ = inputs(
        client,
        temperature=0.5,
        seed=3,
        stop=["a"],
        logit_bias={"5": -2},
        max_completion_tokens=7,
        max_tokens=9,
        presence_penalty=0.1,
        response_format=form,
        user="somebody",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        n=1,
        extra_body={"top_k": 5, "priority": 1, "chat_template_kwargs": {"a": 1}, "unknown_but_null": None},
    )
    assert sampling == {
        "temperature": 0.5, "seed": 3, "stop": ["a"], "logit_bias": {"5": -2}, "max_tokens": 7,
        "presence_penalty": 0.1, "response_format": form, "top_k": 5, "priority": 1, "chat_template_kwargs": {"a": 1},
    }  # fmt: skip
    assert given["stream"] == [False] and "text_input" not in given and "exclude_input_in_output" not in given
    assert {name for name in given if name.startswith("return_")} == {
        "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_num_cached_tokens",
    }  # fmt: skip
    assert inputs(client)[1] == {"max_tokens": 2**31 - 1}


def test_messages_are_what_templates_take(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
            "no_such_but_null": None,
        },
        {"role": "assistant", "content": None},
        {"role": "user", "name": "somebody", "content": [{"type": "text", "text": "x", "cache_control": {"a": "b"}}]},
        {"role": "assistant", "content": "y", "reasoning_content": "z"},
        {"role": "tool", "tool_call_id": "call_1", "content": "4 \u2028 ü"},
    ]
    _, _, sent = inputs(client, messages)
    assert sent[:-1] == [
        {"role": "system", "content": "be\nkind"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "assistant", "content": ""},
        {"role": "user", "name": "somebody", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "z"},
        {"role": "tool", "tool_call_id": "call_1", "content": "4 \u2028 ü"},
    ]


def test_answer_of_the_clients_own_library_is_taken_back(client: openai.OpenAI) -> None:
    messages = script(say=['<tool_call>{"name": "City", "arguments": {"name": "Rome"}}</tool_call>'])
    tool = openai.pydantic_function_tool(City)
    made = client.chat.completions.parse(model="says", messages=messages, tools=[tool])  # type: ignore[arg-type]
    message = made.choices[0].message
    for back in (message.model_dump(), message.model_dump(exclude_none=True)):
        _, _, sent = inputs(client, [back, {"role": "tool", "tool_call_id": "x", "content": "sunny"}])
        assert sent[0]["tool_calls"][0]["function"] == {"name": "City", "arguments": {"name": "Rome"}}
    stream_options: Any = {"include_usage": True, "include_obfuscation": False}
    assert ask_stream(client, script(say=["x"]), stream_options=stream_options)[-1].usage


def test_logprobs(client: openai.OpenAI) -> None:
    entries = [
        {
            "7": {"logprob": -0.5, "rank": 2, "decoded_token": "é"},
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        },
        {"9": {"logprob": float("-inf"), "rank": 9, "decoded_token": "c"}},
    ]
    messages = script(say=["é", "c"], outputs={"logprobs": json.dumps(entries), "output_ids": [7, 9]})
    for fields in ({}, {"top_logprobs": 1}):
        num_best = fields.get("top_logprobs", 0)
        whole = ask(client, messages, logprobs=True, **fields).choices[0].logprobs
        streamed = ask_stream(client, messages, logprobs=True, **fields)
        assert whole is not None and whole.content is not None
        assert [(t.token, t.logprob, t.bytes) for t in whole.content] == [("é", -0.5, [195, 169]), ("c", -9999.0, [99])]
        assert [[(b.token, b.logprob) for b in t.top_logprobs] for t in whole.content] == [
            [("b", -0.25)][:num_best],
            [("c", -9999.0)][:num_best],
        ]
        parts = [chunk.choices[0].logprobs for chunk in streamed]
        assert [t for part in parts if part and part.content for t in part.content] == whole.content
    _, sampling, _ = inputs(client, logprobs=True, top_logprobs=3)
    assert sampling["logprobs"] == 3


def test_completions_logprobs_and_echo(client: openai.OpenAI) -> None:
    def entry(token: str, logprob: float) -> dict[str, object]:
        return {
            "1": {"logprob": logprob, "rank": 2, "decoded_token": token},
            "2": {"logprob": -0.1, "decoded_token": "?"},
        }

    prompt = json.dumps({
        "say": ["x", "y"],
        "outputs": {
            "logprobs": json.dumps([entry("x", -1), entry("y", -2)]),
            "prompt_logprobs": json.dumps([None, entry('"', -3), entry("}", -4)]),
        },
    })  # fmt: skip
    prompt = prompt[:-1] + ', "z": "a"}'
    text, first = prompt[:-2], len(prompt) - 2
    made = client.completions.create(model="says", prompt=prompt, logprobs=1, echo=True, max_tokens=2).choices[0]
    assert made.text == prompt + "xy" and made.logprobs is not None
    assert made.logprobs.tokens == [text, '"', "}", "x", "y"]
    assert made.logprobs.token_logprobs == [None, -3, -4, -1, -2]
    assert made.logprobs.text_offset == [0, first, first + 1, first + 2, first + 3]
    assert made.logprobs.top_logprobs == [
        None,
        *({"?": -0.1, t: p} for t, p in (('"', -3), ("}", -4), ("x", -1), ("y", -2))),
    ]
    scored = client.completions.create(model="says", prompt=prompt, logprobs=1, echo=True, max_tokens=0)
    assert scored.choices[0].text == prompt and scored.usage is not None and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs is not None and scored.choices[0].logprobs.token_logprobs == [None, -3, -4]
    plain = client.completions.create(model="says", prompt=prompt, logprobs=0).choices[0]
    assert plain.logprobs is not None and plain.logprobs.top_logprobs == [{"x": -1}, {"y": -2}]


def test_call_of_a_tool(client: openai.OpenAI) -> None:
    messages = script(say=["Let me", " look.\n<tool", *CALL.removeprefix("<tool"), " "])
    whole = ask(client, messages, tools=[WEATHER, NOW]).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me look."
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    chunks = ask_stream(client, messages, tools=[WEATHER, NOW], tool_choice="auto")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me look."
    first, *parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert first.id and first.type == "function" and first.function and first.function.name == "get_weather"
    assert first.function.arguments == "" and all(part.id is None and part.index == 0 for part in parts)
    arguments = [part.function.arguments or "" for part in parts if part.function]
    assert "".join(arguments) == call.function.arguments and len(arguments) > 5
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def names_of(calls: Any) -> list[str]:
    return [call.function.name for call in calls]


def test_the_clients_own_stream_helper_reads_parallel_calls(client: openai.OpenAI) -> None:
    messages = script(say=[CALL, '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'])
    tools: Any = [WEATHER, NOW]
    spoken: Any = messages
    with client.chat.completions.stream(model="says", messages=spoken, tools=tools) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None and names_of(calls) == ["get_weather", "now"]
    one = ask(client, messages, tools=[WEATHER, NOW], parallel_tool_calls=False).choices[0].message.tool_calls
    assert names_of(one) == ["get_weather"]


class City(BaseModel):
    name: str


def test_the_clients_own_helpers_for_schemas(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(model="says", messages=script(say=['{"name": "Oslo"}']), response_format=City)  # type: ignore[arg-type]
    assert made.choices[0].message.parsed == City(name="Oslo")
    tool = openai.pydantic_function_tool(City)
    call = '<tool_call>{"name": "City", "arguments": {"name": "Rome"}}</tool_call>'
    called = client.chat.completions.parse(model="says", messages=script(say=[call]), tools=[tool])  # type: ignore[arg-type]
    calls = called.choices[0].message.tool_calls
    assert calls is not None and calls[0].function.parsed_arguments == City(name="Rome")


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        made = ask(client, script(say=[CALL]), **fields).choices[0]
        assert (made.message.content, made.message.tool_calls, made.finish_reason) == (CALL, None, "stop")
    assert "tools" not in inputs(client, tools=[WEATHER], tool_choice="none")[1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("<tool_", []),
        ('<tool_call>\n{"name": "', []),
        ('<tool_call>\n{"name": "get_weather", "argum', [("get_weather", "")]),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "O', [("get_weather", '{"city": "O')]),
    ],
)
def test_forced_call_that_the_limit_cuts_is_never_markup(
    client: openai.OpenAI, choice: Any, said: str, calls: list[tuple[str, str]]
) -> None:
    fields = {"messages": script(say=[said[:9], said[9:]], finish="length"), "tools": [WEATHER], "tool_choice": choice}
    whole = ask(client, **fields).choices[0]
    assert whole.finish_reason == "length" and not whole.message.content
    assert [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []] == calls  # type: ignore[union-attr]
    chunks = [chunk.choices[0] for chunk in ask_stream(client, **fields)]
    assert chunks[-1].finish_reason == "length" and not any(chunk.delta.content for chunk in chunks)
    functions = [call.function for chunk in chunks for call in chunk.delta.tool_calls or [] if call.function]
    assert [function.name for function in functions if function.name] == [name for name, _ in calls]
    assert "".join(function.arguments or "" for function in functions) == "".join(part for _, part in calls)


def test_tools_and_forced_calls_are_sent_on(client: openai.OpenAI) -> None:
    _, sampling, _ = inputs(client, tools=[WEATHER, NOW])
    assert sampling["tools"] == [WEATHER, NOW] and "guided_decoding" not in sampling
    _, sampling, _ = inputs(client, tools=[WEATHER, NOW], tool_choice="required")
    grammar = sampling["guided_decoding"]["grammar"]
    assert "<tool_call>" in grammar and "get_weather" in grammar and '"now"' in grammar and "{0,15}" in grammar
    named = {"type": "function", "function": {"name": "now"}}
    _, sampling, _ = inputs(client, tools=[WEATHER, NOW], tool_choice=named)
    grammar = sampling["guided_decoding"]["grammar"]
    assert "get_weather" not in grammar and '"now"' in grammar and "{0,15}" not in grammar
    assert sampling["tools"] == [WEATHER, NOW]


def test_guide_that_cannot_be_made_of_tools_is_a_fault_of_the_tools(client: openai.OpenAI) -> None:
    messages = script(error="INVALID_ARGUMENT: guided_decoding: got 'start: ...'; allowed: a grammar (no such $ref)")
    with pytest.raises(openai.BadRequestError, match=r"tools: .* \(no such \$ref\)") as refused:
        ask(client, messages, tools=[NOW], tool_choice="required")
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as own:
        ask(client, messages, extra_body={"guided_decoding": {"regex": "("}})
    assert own.value.param == "guided_decoding"


def test_error_within_a_stream_is_an_error_of_the_client(client: openai.OpenAI) -> None:
    messages = script(say=["some", " text"], error="INTERNAL: the model broke (request id '5')")
    with pytest.raises(openai.APIError, match="^the model broke$"):
        ask_stream(client, messages)
    held = script(say=["some", " text"], finish="error", error_after=True, error="INTERNAL: the model broke")
    with pytest.raises(openai.APIError, match="^the model broke$"):
        ask_stream(client, held)
    with pytest.raises(openai.InternalServerError, match="the model broke"):
        ask(client, script(error="INTERNAL: the model broke"))
