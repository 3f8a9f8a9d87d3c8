"""Completions by the official client, from the real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from nereid.cli.server_process import TritonServer
from tests.gateway.conftest import Gateway
from tests.server.http_client import generate
from tests.server.waiting import at_once

PROMPT = "The capital of France is"


def test_completion_is_the_servers_own_answer(client: openai.OpenAI, triton: TritonServer) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 1}
    made = client.completions.create(**fields, extra_body={"cache": False})
    own = generate(
        triton, "tiny", PROMPT, {"max_tokens": 12, "temperature": 0, "seed": 1}, exclude_input_in_output=True
    )
    assert made.choices[0].text == own.text
    assert made.choices[0].finish_reason == "length" and made.choices[0].logprobs is None
    assert made.object == "text_completion" and made.model == "tiny"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 12, 17)
    assert made.usage.prompt_tokens_details is not None and made.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_was_found_in_the_cache(client: openai.OpenAI, stream: bool) -> None:
    """Of the prompt's and of its own tenant's alone."""
    create: Any = client.completions.create
    prompt = " ".join(f"{stream} {number}" for number in range(20))

    def usage(salt: str) -> Any:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        made = create(
            model="tiny", prompt=prompt, max_tokens=20, stream=stream, extra_body={"cache_salt": salt}, **options
        )
        return list(made)[-1].usage if stream else made.usage

    first, second, others = usage("a"), usage("a"), usage("b")
    assert first.prompt_tokens_details.cached_tokens == others.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1 > 20
    assert first.total_tokens == second.total_tokens == second.prompt_tokens + 20


def test_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=7)
    events = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=20, seed=7, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({event.id for event in events}) == 1
    *texts, usage = events
    assert "".join(event.choices[0].text for event in texts) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in texts] == [None] * (len(texts) - 1) + ["length"]
    assert all(event.usage is None for event in texts)
    assert usage.choices == [] and usage.usage is not None and whole.usage is not None
    assert usage.usage.total_tokens == whole.usage.total_tokens


def test_default_max_tokens_is_sixteen(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert made.usage is not None and made.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_choices_in_their_order(client: openai.OpenAI, stream: bool) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    asked = {"model": "tiny", "max_tokens": 8, "seed": 3}
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]  # type: ignore[call-overload]
    made = client.completions.create(prompt=prompts, stream=stream, **asked)  # type: ignore[call-overload]
    texts = [""] * 4
    for event in made if stream else [made]:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == alone
    assert stream or made.usage.completion_tokens == 32


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_token_ids(client: openai.OpenAI, stream: bool) -> None:
    ids = [504, 3575, 282, 4649, 314]  # PROMPT
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0, "stream": stream}

    def texts(prompt: object, **more: object) -> list[str]:
        made = client.completions.create(prompt=prompt, **asked, **more)  # type: ignore[call-overload]
        found = ["", ""]
        for event in made if stream else [made]:
            for choice in event.choices:
                found[choice.index] += choice.text
        return found

    whole = texts(PROMPT)
    assert texts(ids) == whole
    assert texts([ids, ids]) == [whole[0]] * 2
    assert texts(PROMPT, echo=True)[0] == texts(ids, echo=True)[0] == PROMPT + whole[0]


def test_stop_seed_and_the_engines_own_fields(client: openai.OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
    stop = text[6:10]
    made = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=0, stop=[stop, "\0"])
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    drawn = [client.completions.create(model="tiny", prompt=PROMPT, seed=seed).choices[0].text for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    greedy = (
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"top_k": 1, "user": "x"}).choices[0].text
    )
    assert greedy == text


def test_many_async_clients_at_once(gateway: Gateway, client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "max_tokens": 10}
    alone = [client.completions.create(prompt=PROMPT, seed=seed, **asked).choices[0].text for seed in range(16)]  # type: ignore[call-overload]

    async def one(asynchronous: openai.AsyncOpenAI, seed: int) -> str:
        stream = await asynchronous.completions.create(prompt=PROMPT, seed=seed, stream=True, **asked)  # type: ignore[call-overload]
        return "".join([event.choices[0].text async for event in stream])

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as asynchronous:
            return await asyncio.gather(*(one(asynchronous, seed) for seed in range(16)))

    assert asyncio.run(together()) == alone


def test_threads_of_one_client(client: openai.OpenAI) -> None:
    made = at_once(lambda seed: client.completions.create(model="tiny", prompt=PROMPT, seed=seed), range(12), threads=6)
    assert [answer.usage.completion_tokens for answer in made if answer.usage] == [16] * 12
