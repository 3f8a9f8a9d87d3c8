"""What a request asks for shows in the real server's answer: guides, masks, biases, penalties, logprobs, tenants."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from nereid.cli.server_process import TritonServer
from nereid.tokenization.tokenizer import Tokenizer
from tests.server.grpc_client import stream_texts
from tests.server.http_client import Answer, generate, generate_stream, joined

MODEL, PROMPT = "tiny", "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ünïcödé", "日本語"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = 'root ::= "<" [a-c]{2,4} ">" number\nnumber ::= [0-9] | [0-9] number'
LARK = 'start: "<" /[a-c]{2,4}/ ">" NUMBER\nNUMBER: /[0-9]{1,3}/'


def ask(server: TritonServer, model: str = MODEL, **fields: Any) -> Answer:
    """The answer alone, without the prompt."""
    return generate(server, model, PROMPT, {"seed": 1, **fields}, exclude_input_in_output=True, **SWITCHES)


SWITCHES = {
    f"return_{name}": True for name in ("finish_reason", "logprobs", "output_ids", "perf_metrics", "stop_reason")
}


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ({"guided_json": SCHEMA}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}, None),
        ({"guided_regex": "[0-9]{3}-(ab|cd)"}, "[0-9]{3}-(ab|cd)"),
        ({"guided_choice": ["yes", "no", "é🙂"]}, "yes|no|é🙂"),
        ({"guided_decoding": {"grammar": LARK}}, "<[a-c]{2,4}>[0-9]{1,3}"),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": EBNF}, "<[a-c]{2,4}>[0-9]+"),
    ],
)
def test_a_guide_decides_what_the_output_is(server: TritonServer, field: dict[str, Any], matches: str | None) -> None:
    for seed in range(3):
        answer = ask(server, max_tokens=200, seed=seed, **field)
        assert answer.json["finish_reason"] == "stop", answer
        if matches is None:
            jsonschema.validate(json.loads(answer.text), SCHEMA)
        else:
            assert re.fullmatch(matches, answer.text), answer.text


def test_a_json_object_is_one(server: TritonServer) -> None:
    answer = ask(server, "smollm2", max_tokens=300, temperature=0, guided_decoding={"json_object": True})
    if answer.json["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert answer.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "no such type"}},
        {"guided_json": {"$ref": "http://127.0.0.1:9/schema.json"}},
        {"guided_regex": "("},
        {"guided_grammar": "start: nothing"},
        {"guided_choice": []},
        {"structured_outputs": {"grammar": "root ::= foo"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}},
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused(server: TritonServer, field: dict[str, Any]) -> None:
    answer = ask(server, **field)
    assert answer.status == 400 and answer.error.startswith(f"INVALID_ARGUMENT: {next(iter(field))}: got "), answer
    assert "allowed: " in answer.error and "r_foo" not in answer.error


def test_a_guide_that_never_compiles_costs_its_request_alone(server: TritonServer) -> None:
    each = [f".*[{letter}].{{{index + 7}}}" for index, letter in enumerate("abcdefghijklmnopqrstuvwx")]
    grammar = f"start: A\nA: /({'|'.join(each)})/ & ~/({'|'.join(each[::-1])}x)/"
    answer = ask(server, guided_grammar=grammar)
    assert answer.status == 400 and answer.error.startswith("INVALID_ARGUMENT: "), answer
    assert "s to compile" in answer.error
    assert ask(server, guided_choice=["that compiles"]).text == "that compiles"


def test_what_leaves_no_token_ends_the_request_alone(server: TritonServer, smollm2_tokenizer: Tokenizer) -> None:
    (letter,) = smollm2_tokenizer.encode("x")
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(ask, server, max_tokens=40, temperature=0, ignore_eos=True)
        answer = ask(server, allowed_token_ids=[letter], guided_choice=["yes"])
    assert answer.status == 400 and answer.error.startswith("INVALID_ARGUMENT: no token can be drawn"), answer
    assert beside.result().text == ask(server, max_tokens=40, temperature=0, ignore_eos=True).text


def test_masks_and_biases_decide_which_tokens_come(server: TritonServer, smollm2_tokenizer: Tokenizer) -> None:
    (x,), (y,) = smollm2_tokenizer.encode("x"), smollm2_tokenizer.encode("y")
    allowed = ask(server, max_tokens=12, allowed_token_ids=[x, y], ignore_eos=True)
    assert set(allowed.json["output_ids"]) == {x, y} and set(allowed.text) == {"x", "y"}
    pushed = ask(server, max_tokens=12, allowed_token_ids=[x, y], logit_bias={str(y): 100}, ignore_eos=True)
    assert pushed.text == "y" * 12
    without = ask(server, max_tokens=12, allowed_token_ids=[x, y], bad_words=["y"], ignore_eos=True)
    assert without.text == "x" * 12


def test_penalties_end_a_repetition(server: TritonServer, smollm2_tokenizer: Tokenizer) -> None:
    ids = [smollm2_tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    one: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "allowed_token_ids": ids}
    assert len(set(ask(server, **one).json["output_ids"])) < 8
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert sorted(ask(server, **{**one, penalty: 100}).json["output_ids"]) == sorted(ids)


def test_logprobs_are_told_in_streams_and_whole(server: TritonServer) -> None:
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 1}
    switches = {**SWITCHES, "return_prompt_logprobs": True, "return_cumulative_logprob": True}
    whole = generate(server, "smollm2", PROMPT, fields, exclude_input_in_output=True, **switches).json
    entries = json.loads(whole["logprobs"])
    assert [int(next(iter(entry))) for entry in entries] == whole["output_ids"]
    for entry in entries:
        assert len(entry) == 3 and [told["rank"] for told in entry.values()] == [1, 2, 3]
    chosen = [next(iter(entry.values())) for entry in entries]
    assert "".join(told["decoded_token"] for told in chosen) == whole["text_output"]
    assert math.isclose(sum(told["logprob"] for told in chosen), whole["cumulative_logprob"], rel_tol=1e-5)
    prompt = json.loads(whole["prompt_logprobs"])
    assert prompt[0] is None and all(1 <= len(entry) <= 2 for entry in prompt[1:])
    events = generate_stream(server, "smollm2", PROMPT, fields, **switches)
    assert joined(events) == whole["text_output"]
    assert [entry for event in events for entry in json.loads(event["logprobs"])] == entries
    assert [json.loads(e["prompt_logprobs"]) for e in events if "prompt_logprobs" in e][0] == prompt


def test_times_and_counts_of_a_request(server: TritonServer) -> None:
    answer = ask(server, max_tokens=5, ignore_eos=True, cache=False).json
    names = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [answer[f"{name}_time_ns"] for name in names]
    assert times == sorted(times) and times[0] > 0 and times[3] - times[0] < 60e9
    assert answer["kv_cache_alloc_new_blocks"] >= 1 and answer["num_preemptions"] == 0
    assert answer["acceptance_rate"] == 0.0 and answer["total_draft_tokens"] == 0


def test_neither_tenant_nor_priority_changes_what_is_said(server: TritonServer) -> None:
    plain = ask(server, max_tokens=10, ignore_eos=True).text
    for fields in (
        {"cache_salt": "one"},
        {"cache_salt": "two", "priority": -5},
        {"cache": False, "speculation": False},
    ):
        assert ask(server, max_tokens=10, ignore_eos=True, **fields).text == plain


def test_guided_and_other_streams_share_steps(server: TritonServer) -> None:
    sampling = {"max_tokens": 60, "seed": 3}
    guided = {**sampling, "guided_regex": "(ab|cd){20}"}
    alone = [answer.text for answer in stream_texts(server, MODEL, [PROMPT] * 2, sampling)]
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(stream_texts, server, MODEL, [PROMPT] * 2, sampling)
        answers = stream_texts(server, MODEL, ["one", "two", "three"], guided)
    assert [answer.text for answer in others.result()] == alone
    assert all(re.fullmatch("(ab|cd){20}", answer.text) for answer in answers)
