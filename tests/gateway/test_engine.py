"""Chats, log-probabilities, schemas and forced calls from the real engine, by the official client. The model is random:
what it says is senseless, but under a guide it cannot help to be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion

from nereid.tokenization.chat_template import ChatTemplate
from tests.conftest import TOLERANCES
from tests.server.waiting import at_once

MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
PROMPT = "The capital of France is"


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    create: Any = client.chat.completions.create
    made: ChatCompletion = create(model="tiny", messages=MESSAGES, **fields)
    return made


def ask_stream(client: openai.OpenAI, **fields: Any) -> list[Any]:
    create: Any = client.chat.completions.create
    return list(create(model="tiny", messages=MESSAGES, stream=True, **fields))


def near(logprobs: Any) -> Any:
    return pytest.approx(logprobs, abs=TOLERANCES["logits_float32"])


def test_chat_is_the_completion_of_its_rendered_prompt(client: openai.OpenAI, smollm2_directory: Path) -> None:
    prompt = ChatTemplate(smollm2_directory).render(MESSAGES)
    rendered = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, seed=5)
    chat = ask(client, max_tokens=24, seed=5)
    assert chat.choices[0].message.content == rendered.choices[0].text
    assert chat.usage is not None and rendered.usage is not None
    assert chat.usage.prompt_tokens == rendered.usage.prompt_tokens
    events = ask_stream(client, max_tokens=24, seed=5)
    assert "".join(event.choices[0].delta.content or "" for event in events) == rendered.choices[0].text


def test_chat_without_a_limit_may_go_on(client: openai.OpenAI) -> None:
    """Beyond the engine's own default of 16 tokens."""
    created: Any = client.chat.completions.create
    with created(model="tiny", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}) as events:
        assert all(next(events).choices[0].finish_reason is None for _ in range(20))


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 8
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0
    events = ask_stream(client, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3)
    parts = [part for event in events if (found := event.choices[0].logprobs) for part in found.content]
    assert [part.token for part in parts] == [token.token for token in choice.logprobs.content]
    assert [part.logprob for part in parts] == near([token.logprob for token in choice.logprobs.content])


def test_prompt_is_scored_as_it_was_drawn(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "echo": True, "logprobs": 1, "temperature": 0}
    drawn = client.completions.create(prompt=PROMPT, max_tokens=4, **asked).choices[0]
    assert drawn.logprobs is not None and drawn.logprobs.tokens is not None
    assert drawn.text.startswith(PROMPT) and "".join(drawn.logprobs.tokens[:5]) == PROMPT
    by_ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], max_tokens=4, **asked).choices[0].logprobs
    assert by_ids is not None and by_ids.tokens == drawn.logprobs.tokens
    assert by_ids.text_offset == drawn.logprobs.text_offset
    whole_by_ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], max_tokens=0, **asked).choices[0]
    assert whole_by_ids.text == PROMPT
    scored = client.completions.create(prompt=PROMPT, max_tokens=0, **asked).choices[0]
    assert scored.text == PROMPT and scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None and drawn.logprobs.token_logprobs is not None
    assert len(scored.logprobs.token_logprobs) == 5 and len(drawn.logprobs.token_logprobs) == 9
    assert scored.logprobs.token_logprobs[0] is None
    for other in (scored.logprobs.token_logprobs, (by_ids.token_logprobs or [])[:5]):
        assert other[1:] == near(drawn.logprobs.token_logprobs[1:5])


def test_prompt_that_the_context_cannot_hold_is_refused_while_others_go_on(client: openai.OpenAI) -> None:
    """The model's length is 8,192 tokens, with one of output at least."""

    def finish_reason(length: int) -> str:
        try:
            made = client.completions.create(model="tiny", prompt=[504] * length, max_tokens=2)
        except openai.BadRequestError as error:
            return error.message
        assert made.usage is not None and made.usage.completion_tokens == min(2, 8192 - length)
        return made.choices[0].finish_reason

    told = at_once(finish_reason, [8193, 8192, 8191, 3], threads=4)
    assert told[2:] == ["length", "length"]
    assert all("at most 8191 tokens" in message for message in told[:2])


def test_schema_holds_for_a_random_model(client: openai.OpenAI) -> None:
    def valid(seed: int) -> bool:
        choice = ask(client, max_tokens=200, seed=seed, response_format=FORM).choices[0]
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        return choice.finish_reason == "stop"

    assert sum(at_once(valid, range(8), threads=4)) > 4


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_are_calls(client: openai.OpenAI, choice: object) -> None:
    def calls(seed: int) -> int:
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 150, "seed": seed}
        made = ask(client, **fields).choices[0]
        found = [call.function for call in made.message.tool_calls or [] if call.type == "function"]
        if made.finish_reason == "tool_calls":
            assert found and made.message.content is None
            for call in found:
                given = json.loads(call.arguments)
                assert given == {} if call.name == "now" else not jsonschema.validate(given, SCHEMA)
        events = ask_stream(client, **fields)
        parts = [part for event in events for part in event.choices[0].delta.tool_calls or []]
        assert [part.function.name for part in parts if part.function.name] == [call.name for call in found]
        assert "".join(part.function.arguments for part in parts) == "".join(call.arguments for call in found)
        assert events[-1].choices[0].finish_reason == made.finish_reason
        return len(found) if made.finish_reason == "tool_calls" else 0

    made = at_once(calls, range(6), threads=3)
    assert sum(number > 0 for number in made) > 3
    assert choice == "required" or max(made) == 1


def test_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        ask(client, response_format=form)
    remote = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://127.0.0.1:1/x"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=[remote], tool_choice="required")
    assert refused.value.param == "tools"
