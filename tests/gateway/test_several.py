"""Several choices for one prompt, by the official client: chats and completions, in streams and whole. The texts are
those of a model that says what it is told; at the end they are the real engine's."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import openai
import pytest

from nereid.gateway.pieces import read_pieces
from tests.gateway.test_chat import CALL, WEATHER, inputs, script

SEQUENCES = [["Go", "od"], ["Bad", " day", "."], ["é"]]
TEXTS = ["".join(said) for said in SEQUENCES]
COUNT = sum(map(len, SEQUENCES))


def chat(client: openai.OpenAI, sequences: list[list[str]] = SEQUENCES, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(model="says", messages=script(sequences=sequences), n=len(sequences), **fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    create: Any = client.completions.create
    prompt = json.dumps({"sequences": SEQUENCES})
    return create(**{"model": "says", "prompt": prompt, "n": len(SEQUENCES), **fields})


def test_choices_of_a_chat(client: openai.OpenAI) -> None:
    made = chat(client)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert [choice.message.content for choice in made.choices] == TEXTS
    assert {choice.finish_reason for choice in made.choices} == {"stop"}
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, COUNT, 11 + COUNT)
    assert usage.prompt_tokens_details.cached_tokens == 8


def test_choices_of_a_streamed_chat(client: openai.OpenAI) -> None:
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    deltas = defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk.choices
        deltas[choice.index].append((choice.delta.role, choice.delta.content, choice.finish_reason))
    assert {
        index: [("assistant", "", None), *((None, text, None) for text in said), (None, None, "stop")]
        for index, said in enumerate(SEQUENCES)
    } == deltas
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (11, COUNT)
    indices = [chunk.choices[0].index for chunk in chunks]
    assert indices != sorted(indices), "they come as they are generated, not one after the other"


def test_choices_of_a_completion(client: openai.OpenAI) -> None:
    made = complete(client)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in made.choices] == [
        (index, text, "stop") for index, text in enumerate(TEXTS)
    ]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (11, COUNT)


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_has_its_own_choices(client: openai.OpenAI, stream: bool) -> None:
    others = [["x"], ["y", "z"], ["w"]]
    prompts = [json.dumps({"sequences": SEQUENCES}), json.dumps({"sequences": others})]
    made = complete(client, prompt=prompts, stream=stream, echo=True)
    texts: dict[int, str] = defaultdict(str)
    for event in made if stream else [made]:
        for choice in event.choices:
            texts[choice.index] += choice.text
    own = [prompts[0] + text for text in TEXTS] + [prompts[1] + "".join(said) for said in others]
    assert texts == dict(enumerate(own))
    assert stream or made.usage.completion_tokens == COUNT + 4


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_belong_to_their_choices(client: openai.OpenAI, stream: bool) -> None:
    sequences = [["Let me", " think."], [CALL[:20], CALL[20:]], ["I look: ", CALL]]
    made = chat(client, sequences, tools=[WEATHER], stream=stream)
    texts, arguments, reasons = dict.fromkeys(range(3), ""), defaultdict[int, str](str), dict[int, str]()
    names = defaultdict[int, list[str]](list)
    for event in made if stream else [made]:
        for choice in event.choices:
            said = choice.delta if stream else choice.message
            texts[choice.index] += said.content or ""
            for call in said.tool_calls or []:
                names[choice.index] += [call.function.name] if call.function.name else []
                arguments[choice.index] += call.function.arguments or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "Let me think.", 1: "", 2: "I look:"}
    assert names == {1: ["get_weather"], 2: ["get_weather"]}
    assert {index: json.loads(text) for index, text in arguments.items()} == {1: {"city": "Oslo"}, 2: {"city": "Oslo"}}
    assert reasons == {0: "stop", 1: "tool_calls", 2: "tool_calls"}


def test_what_the_model_is_given(client: openai.OpenAI) -> None:
    assert "n" not in inputs(client, n=1)[1]
    assert inputs(client, extra_body={"beam_width": 3})[1]["n"] == 1, "not all beams, as the engine would by itself"
    spoken = json.dumps({"inputs": True})
    for fields, told in (({"best_of": 3}, {"best_of": 3}), ({"n": 1, "best_of": 1}, {"best_of": 1})):
        made = complete(client, prompt=spoken, **{"n": 1, **fields})
        sampling = json.loads(json.loads(made.choices[0].text)["sampling_parameters"][0])
        assert {name: sampling[name] for name in ("n", "best_of") if name in sampling} == told


def test_answer_of_fewer_or_more_sequences_is_an_error(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    for stream in (False, True):
        with pytest.raises(openai.APIError, match="before it was whole"):
            list(create(model="says", messages=script(sequences=SEQUENCES), n=4, stream=stream))
        with pytest.raises(openai.APIError, match="more sequences than asked for"):
            list(create(model="says", messages=script(sequences=SEQUENCES), n=2, stream=stream))


class Result:
    """What a client of Triton's gets."""

    def __init__(self, **outputs: Any) -> None:
        self._outputs = outputs

    def as_numpy(self, name: str) -> Any:
        return self._outputs.get(name)


def texts_of(*texts: str) -> Any:
    return np.array([text.encode() for text in texts], dtype=object)


def test_a_response_of_several_sequences_is_read_element_by_element() -> None:
    def entry(token_id: int, token: str) -> dict[str, object]:
        return {"9": {"logprob": -0.1, "decoded_token": "?"}, str(token_id): {"logprob": -2, "decoded_token": token}}

    result = Result(
        text_output=texts_of("ab", "c"),
        finish_reason=texts_of("stop", "length"),
        num_output_tokens=np.array([2, 1], np.uint32),
        num_input_tokens=np.array([4], np.uint32),
        output_ids=np.array([1, 2, 3], np.int32),
        logprobs=texts_of(json.dumps([entry(1, "a"), entry(2, "b")]), json.dumps([entry(3, "c")])),
    )
    first, second = read_pieces(result)
    assert [(p.sequence_index, p.text, p.finish_reason, p.num_output_tokens) for p in (first, second)] == [
        (0, "ab", "stop", 2), (1, "c", "length", 1),
    ]  # fmt: skip
    assert [position.token for position in first.logprobs] == ["a", "b"]
    assert [position.token for position in second.logprobs] == ["c"]
    assert first.num_input_tokens == second.num_input_tokens == 4 and first.num_cached_tokens is None


def test_a_response_without_data_is_a_piece_that_says_nothing() -> None:
    (piece,) = read_pieces(Result())
    assert (piece.sequence_index, piece.text, piece.finish_reason, piece.num_output_tokens) == (0, "", None, 0)


# The engine's own

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "hello"}]
TINY: dict[str, Any] = {"model": "tiny", "seed": 5, "extra_body": {"ignore_eos": True}}


def choices_of(made: Any, stream: bool) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    for event in made if stream else [made]:
        for choice in event.choices:
            said = choice.text if hasattr(choice, "text") else (choice.delta if stream else choice.message).content
            texts[choice.index] += said or ""
    return dict(sorted(texts.items()))


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_streamed_choices_are_the_whole_ones_and_the_first_is_that_of_one(client: openai.OpenAI, kind: str) -> None:
    create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
    asked = {**TINY, "max_tokens": 16, **({"messages": MESSAGES} if kind == "chat" else {"prompt": PROMPT})}
    whole = create(n=3, **asked)
    texts = choices_of(whole, stream=False)
    assert len(set(texts.values())) == 3 and choices_of(create(**asked), stream=False) == {0: texts[0]}
    events = list(create(n=3, stream=True, stream_options={"include_usage": True}, **asked))
    assert choices_of(events, stream=True) == texts
    assert whole.usage.completion_tokens == events[-1].usage.completion_tokens == 48
    assert whole.usage.prompt_tokens == events[-1].usage.prompt_tokens


def test_choices_of_prompts_of_ids_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    ids = [504, 3575, 282, 4649, 314]  # PROMPT
    create: Any = client.completions.create
    for prompt in (PROMPT, ids):
        for stream in (False, True):
            made = create(n=2, prompt=prompt, echo=True, logprobs=1, max_tokens=4, stream=stream, **TINY)
            events = list(made) if stream else [made]
            texts = choices_of(events if stream else made, stream)
            assert set(texts) == {0, 1} and all(text.startswith(PROMPT) for text in texts.values())
            tokens: dict[int, list[str]] = defaultdict(list)
            for event in events:
                for choice in event.choices:
                    tokens[choice.index] += choice.logprobs.tokens
            assert ["".join(tokens[index][:5]) for index in range(2)] == [PROMPT] * 2
            assert [len(tokens[index]) for index in range(2)] == [9, 9]


def test_best_of_chooses_among_the_choices(client: openai.OpenAI) -> None:
    create: Any = client.completions.create
    asked = {**TINY, "prompt": PROMPT, "max_tokens": 6}
    made = create(n=4, logprobs=0, **asked).choices
    totals = {choice.text: sum(choice.logprobs.token_logprobs) for choice in made}
    ranked = sorted(totals, key=lambda text: -totals[text])
    assert [choice.text for choice in create(n=2, best_of=4, **asked).choices] == ranked[:2]
    assert [choice.text for choice in create(best_of=4, **asked).choices] == ranked[:1]


def test_beams_by_the_engines_own_fields(client: openai.OpenAI) -> None:
    create: Any = client.completions.create
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
    texts = [c.text for c in create(n=3, extra_body={"beam_width": 3, "length_penalty": 0}, **asked).choices]
    assert len(set(texts)) == 3
    assert [c.text for c in create(extra_body={"beam_width": 3, "length_penalty": 0}, **asked).choices] == texts[:1]
    old = create(n=3, extra_body={"use_beam_search": True, "length_penalty": 0}, **asked).choices
    assert [c.text for c in old] == texts


def test_each_choice_of_a_forced_call_is_a_call(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "n": 3, "seed": 1}
    made = create(max_tokens=100, **asked)
    for choice in made.choices:
        calls = choice.message.tool_calls
        assert calls and {call.function.name for call in calls} == {"get_weather"} and not choice.message.content
    reasons: dict[int, str] = {}
    names: dict[int, list[str]] = defaultdict(list)
    for event in create(max_tokens=100, stream=True, **asked):
        for choice in event.choices:
            names[choice.index] += [c.function.name for c in choice.delta.tool_calls or [] if c.function.name]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert reasons == {choice.index: choice.finish_reason for choice in made.choices}
    assert names == {c.index: [call.function.name for call in c.message.tool_calls] for c in made.choices}
