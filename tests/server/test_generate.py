"""The default model by all three protocols: the same answer, complete, by itself and beside many others."""

from __future__ import annotations

import random
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest

from nereid.cli.server_process import TritonServer
from nereid.tokenization.chat_template import ChatTemplate
from tests.conftest import read_json, shared_data, spec_bench_prompts
from tests.server.grpc_client import GrpcStream, stream_texts
from tests.server.http_client import Answer, generate, generate_stream, joined
from tests.server.server_state import is_live, wait_until_idle
from tests.server.waiting import at_once

GREEDY = {"temperature": 0}


def test_capital_of_france_by_all_three_protocols(server: TritonServer, smollm2_directory: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ChatTemplate(smollm2_directory).render(question)
    sampling = {**GREEDY, "max_tokens": 32}
    whole = generate(server, "smollm2", prompt, sampling, exclude_input_in_output=True).text
    events = generate_stream(server, "smollm2", prompt, sampling, exclude_input_in_output=True)
    with GrpcStream(server) as stream:
        streamed = stream.send("smollm2", "paris", prompt, sampling, exclude_input_in_output=True)
        stream.wait_done()
    assert "Paris" in whole
    assert joined(events) == whole
    assert streamed.text == whole


def longest_match(text: str, others: list[str], own: int) -> int:
    """Index of the other text that shares the longest beginning; `own` where it shares as much as any."""
    return max(range(len(others)), key=lambda i: (len(commonprefix([text, others[i]])), i == own))


def assert_none_mixed_up(server: TritonServer, model: str, num_alone_tokens: int, temperature: float) -> None:
    """64 streams of 64 tokens at once; each is likest to what its own prompt gives alone."""
    prompts = [f"{index} {prompt[:80]}" for index, prompt in enumerate(spec_bench_prompts(64))]
    settings = [{"seed": index, "temperature": temperature, "ignore_eos": True} for index in range(64)]
    with GrpcStream(server) as stream:
        for index, prompt in enumerate(prompts):
            stream.send(model, f"{index}", prompt, {**settings[index], "max_tokens": 64})
        answers = list(stream.wait_done(240).values())
        for index, prompt in enumerate(prompts):
            stream.send(model, f"{index} alone", prompt, {**settings[index], "max_tokens": num_alone_tokens})
            stream.wait_done()
        alone = [stream.answers[f"{index} alone"].text for index in range(64)]
    assert [answer.num_tokens for answer in answers] == [64] * 64
    assert all(answer.reasons[-1] == "length" for answer in answers)
    assert len(set(alone)) > 48, "too many begin alike to tell them apart"
    assert [longest_match(answer.text, alone, index) for index, answer in enumerate(answers)] == list(range(64))


@pytest.mark.parametrize("num_alone_tokens", [6, pytest.param(64, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_64_streams_of_smollm2_are_complete_and_none_mixed_up(server: TritonServer, num_alone_tokens: int) -> None:
    assert_none_mixed_up(server, "smollm2", num_alone_tokens, temperature=0.7)


def test_64_streams_of_tiny_are_complete_and_none_mixed_up(server: TritonServer) -> None:
    assert_none_mixed_up(server, "tiny", 24, temperature=1.0)


def assert_deltas_join_to_the_whole(server: TritonServer, model: str, count: int, **sampling: Any) -> None:
    """One request after another, so that both ways compute the same."""
    draw = random.Random(count)
    for index, prompt in enumerate(spec_bench_prompts(count)):
        settings = {**sampling, "max_tokens": draw.randint(1, 40), "seed": index}
        events = generate_stream(server, model, prompt[:200], settings, exclude_input_in_output=True)
        whole = generate(server, model, prompt[:200], settings, exclude_input_in_output=True)
        assert joined(events) == whole.text, (prompt, settings)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_deltas_of_smollm2_join_to_the_whole_text(server: TritonServer, count: int) -> None:
    assert_deltas_join_to_the_whole(server, "smollm2", count, **GREEDY)


def test_deltas_of_tiny_join_to_the_whole_text(server: TritonServer) -> None:
    assert_deltas_join_to_the_whole(server, "tiny", 200)


def test_tiny_says_characters_of_several_tokens(server: TritonServer) -> None:
    """What makes the test above one of the detokenizer: characters whole in spite of random pieces, and U+FFFD only
    where pieces make none."""
    answers = stream_texts(server, "tiny", [str(i) for i in range(8)], {"max_tokens": 200, "ignore_eos": True})
    text = "".join(answer.text for answer in answers)
    assert sum(ord(char) > 0x7F and char != "\ufffd" for char in text) > 20
    assert text.count("\ufffd") > 20


def is_answer_or_clean_error(answer: Answer) -> bool:
    return answer.status == 200 or (answer.status == 400 and answer.error.startswith("INVALID_ARGUMENT: "))


def assert_survives_naughty_strings(server: TritonServer, model: str) -> None:
    strings: list[str] = read_json(shared_data("naughty_strings.json"))
    answers = at_once(lambda text: generate(server, model, text, {"max_tokens": 4}), strings, threads=16)
    assert len(answers) == 515
    assert [a for a in answers if not is_answer_or_clean_error(a)] == []
    assert all(a.text.startswith(s) for a, s in zip(answers, strings, strict=True) if a.status == 200)
    wait_until_idle(server, model)
    assert is_live(server)


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_naughty_strings_get_an_answer_or_a_clean_error(server: TritonServer, model: str) -> None:
    assert_survives_naughty_strings(server, model)
