"""The request parser without a server: where fields come from, every accepted form, every refusal by name."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError
from nereid.guided.compiler import GuideCompiler
from nereid.request import Branching, Guide, GuideKind, Request
from nereid.server.field import Field, Group
from nereid.server.fields import FIELDS
from nereid.server.parameters import Limits
from nereid.server.reply import ReplyOptions
from nereid.server.request_parser import Deployment, RequestParser
from nereid.server.sources import RawRequest
from nereid.server.texts import Texts
from nereid.tokenization.tokenizer import Tokenizer
from tests.conftest import shared_data

LIMITS = Limits(vocab_size=100, default_max_tokens=16, default_timeout_ms=1000)
STREAMING = Deployment(decoupled=True)
BATCHED = Deployment(decoupled=True, batched=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Words "w0" to "w99" as ids 0 to 99; no chat template."""
    library = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    folder: Path = tmp_path_factory.mktemp("words")
    library.save(str(folder / "tokenizer.json"))
    return Texts.of_model(Tokenizer(folder), folder)


@pytest.fixture(scope="module")
def compiler(smollm2_tokenizer: Tokenizer) -> GuideCompiler:
    """Of another model than `texts`, whose few words cannot be guided."""
    return GuideCompiler(smollm2_tokenizer, 49152, (2,))


def make(texts: Texts, deployment: Deployment = STREAMING, limits: Limits = LIMITS, **more: Any) -> RequestParser:
    return RequestParser(limits, texts, deployment, max_model_len=50, block_size=4, **more)


@pytest.fixture
def parser(texts: Texts) -> RequestParser:
    return make(texts)


def raw(_parameters: dict[str, object] | None = None, /, **inputs: Any) -> RawRequest:
    arrays = {}
    for name, value in inputs.items():
        if isinstance(value, (str, bytes)):
            arrays[name] = np.array([value.encode() if isinstance(value, str) else value], dtype=object)
        else:
            arrays[name] = np.asarray(value if isinstance(value, (list, np.ndarray)) else [value])
    return RawRequest(arrays, _parameters or {}, arrival_time=5.0)


def with_json(parser: RequestParser, **given: object) -> Request:
    return parser.encode(parser.check(raw(text_input="w3", sampling_parameters=json.dumps(given))))[0]


def parse(parser: RequestParser, request: RawRequest) -> tuple[Request, ReplyOptions]:
    parsed, builder = parser.encode(parser.check(request))
    return parsed, builder.options


def test_the_plain_request(parser: RequestParser) -> None:
    request, options = parse(parser, raw(text_input="w3 w4"))
    assert request.prompt_token_ids == (3, 4) and request.deadline == 6.0
    assert request.sampling.max_tokens == 16 and request.sampling.temperature == 1.0
    assert (request.priority, request.cache_salt, request.cache, request.speculation) == (0, "", True, True)
    assert options == ReplyOptions(False, "w3 w4", 2)


# The table


def test_no_two_fields_share_a_name() -> None:
    names = [name for field in FIELDS for name in (field.name, *field.aliases)]
    assert len(names) == len(set(names))


# A value of each field that differs from its default, and how it shows in the request.
SHOWN: dict[str, tuple[object, str, object]] = {
    "max_tokens": (7, "sampling.max_tokens", 7),
    "min_tokens": (3, "sampling.min_tokens", 3),
    "temperature": (0.5, "sampling.temperature", 0.5),
    "top_k": (4, "sampling.top_k", 4),
    "top_p": (0.25, "sampling.top_p", 0.25),
    "min_p": (0.125, "sampling.min_p", 0.125),
    "seed": (2**64 - 1, "sampling.seed", 2**64 - 1),
    "repetition_penalty": (1.5, "sampling.repetition_penalty", 1.5),
    "frequency_penalty": (-0.5, "sampling.frequency_penalty", -0.5),
    "presence_penalty": (2, "sampling.presence_penalty", 2.0),
    "logit_bias": ({"5": -100, "7": 1.5}, "sampling.logit_bias", ((5, -100.0), (7, 1.5))),
    "allowed_token_ids": ([3, 4, 3], "sampling.allowed_token_ids", (3, 4)),
    "bad_words": (["w5 w6", "w7"], "sampling.bad_words", ((5, 6), (7,))),
    "stop": (["a", "bc"], "sampling.stop", ("a", "bc")),
    "stop_token_ids": ([1, 99, 1], "sampling.stop_token_ids", (1, 99)),
    "include_stop_str_in_output": (True, "sampling.include_stop", True),
    "ignore_eos": (True, "sampling.ignore_eos", True),
    "skip_special_tokens": (False, "sampling.show_control_tokens", True),
    "logprobs": (5, "sampling.logprobs", 5),
    "prompt_logprobs": (0, "sampling.prompt_logprobs", 0),
    "guided_decoding": ({"regex": "a+"}, "sampling.guide", Guide(GuideKind.REGEX, "a+")),
    "guided_json": ({"type": "null"}, "sampling.guide", Guide(GuideKind.JSON_SCHEMA, '{"type": "null"}')),
    "guided_regex": ("b*", "sampling.guide", Guide(GuideKind.REGEX, "b*")),
    "guided_grammar": ("start: /x/", "sampling.guide", Guide(GuideKind.GRAMMAR, "start: /x/")),
    "guided_choice": (["é", "no"], "sampling.guide", Guide(GuideKind.CHOICE, '["é", "no"]')),
    "response_format": ({"type": "json_object"}, "sampling.guide", Guide(GuideKind.JSON_OBJECT)),
    "n": (3, "branching.n", 3),
    "best_of": (3, "branching.best_of", 3),
    "beam_width": (4, "branching", Branching(4, 4, 4)),
    "priority": (-7, "priority", -7),
    "cache_salt": ("tenant é", "cache_salt", "tenant é"),
    "cache": (False, "cache", False),
    "speculation": (False, "speculation", False),
    "timeout_ms": (2000, "deadline", 7.0),
    "end_id": (9, "sampling.stop_token_ids", (9,)),
}
OF_BEAMS = {"length_penalty", "early_stopping", "use_beam_search"}  # without effect by themselves
NAMES = [(field, name) for field in FIELDS if field.name in SHOWN for name in (field.name, *field.aliases)]


def shown(request: Request, path: str) -> object:
    found: object = request
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_every_field_that_shapes_a_request_is_in_the_table_above() -> None:
    groups = (Group.SAMPLING, Group.GUIDE, Group.SEQUENCES, Group.SCHEDULING)
    with_others = {"guided_decoding_guide_type", "guided_decoding_guide"} | OF_BEAMS
    assert {field.name for field in FIELDS if field.group in groups} - with_others == set(SHOWN) - {"end_id"}


@pytest.mark.parametrize(("field", "name"), NAMES, ids=lambda item: item if isinstance(item, str) else "")
def test_a_field_is_the_same_from_all_three_sources_under_all_its_names(
    parser: RequestParser, field: Field, name: str
) -> None:
    value, path, expected = SHOWN[field.name]
    tensor = json.dumps(value) if isinstance(value, dict) or (isinstance(value, list) and field.dims == (1,)) else value
    parameter = (
        json.dumps(value) if isinstance(value, (dict, list)) and field.name not in ("stop", "bad_words") else value
    )
    if field.data_type == "TYPE_STRING" and isinstance(tensor, list):
        tensor = np.array([text.encode() for text in tensor], dtype=object)
    for request in (
        raw(text_input="w3", sampling_parameters=json.dumps({name: value})),
        raw(text_input="w3", **{name: tensor}),
        raw({name: parameter}, text_input="w3"),
    ):
        assert shown(parse(parser, request)[0], path) == expected


def test_a_tensor_goes_before_the_json_and_that_before_a_parameter(parser: RequestParser) -> None:
    parameters: dict[str, object] = {"max_tokens": 1, "top_k": 1, "min_tokens": 1, "triton_any": True, "timeout": 5}
    request = raw(parameters, text_input="w3", sampling_parameters='{"max_tokens": 2, "top_k": 2}', max_tokens=3)
    sampling = parse(parser, request)[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.min_tokens) == (3, 2, 1)


def test_null_is_not_given_and_lets_the_next_source_speak(parser: RequestParser) -> None:
    request = raw({"max_tokens": 5}, text_input="w3", sampling_parameters='{"max_tokens": null, "temperature": null}')
    sampling = parse(parser, request)[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (5, 1.0)
    assert with_json(parser).sampling.seed != with_json(parser).sampling.seed


def test_two_names_of_one_field_may_not_disagree(parser: RequestParser) -> None:
    assert with_json(parser, n=1, num_return_sequences=1, seed=4, random_seed=4).sampling.seed == 4
    with pytest.raises(InvalidRequestError, match="stop, stop_words: got 'a' and 'b'; allowed: one of the two"):
        with_json(parser, stop="a", stop_words="b")


@pytest.mark.parametrize(
    "given",
    [
        {"n": "2", "num_return_sequences": 2.0},
        {"max_tokens": 2, "request_output_len": "2"},
        {"min_tokens": 1.0, "min_length": "1"},
        {"stop": "a", "stop_words": ["a", ""]},
        {"seed": "7", "random_seed": 7},
        {"top_p": 1, "runtime_top_p": "1.0"},
        {"length_penalty": "0", "len_penalty": 0.0},
        {"stream": "true", "streaming": True},
        {"guided_decoding": {"regex": "a"}, "structured_outputs": '{"regex": "a"}'},
    ],
)
def test_two_names_agree_where_they_say_the_same_however_it_is_spelled(
    parser: RequestParser, given: dict[str, object]
) -> None:
    with_json(parser, **given)
    with_json(parser, **dict(reversed(given.items())))


def test_of_two_names_a_wrong_value_is_refused_under_its_own(parser: RequestParser) -> None:
    with pytest.raises(InvalidRequestError, match="request_output_len: got 'x'"):
        with_json(parser, max_tokens=2, request_output_len="x")


@pytest.mark.parametrize(
    ("value", "expected"), [("8", 8), (" 8 ", 8), (8.0, 8), ("1e3", 1000), (10**18, 10**18), ("1e18", 10**18)]
)
def test_numbers_may_come_as_strings_and_be_huge(parser: RequestParser, value: object, expected: int) -> None:
    assert with_json(parser, max_tokens=value).sampling.max_tokens == expected


@pytest.mark.parametrize("value", ["", [], [""], ["", ""]])
def test_empty_texts_in_stop_and_bad_words_are_ignored(parser: RequestParser, value: object) -> None:
    sampling = with_json(parser, stop=value, bad_words=value).sampling
    assert sampling.stop == () and sampling.bad_words == ()
    assert with_json(parser, stop=["", "x"]).sampling.stop == ("x",)


WRONG: dict[str, list[object]] = {
    "max_tokens": [0, -1, "x", 1.5, True, [1], "", {}],
    "min_tokens": [-1, 17, "none"],
    "temperature": [-0.1, "hot", "inf", "nan", 1e7, False],
    "top_p": [-0.1, 1.1, []],
    "min_p": [-1e-9, 2],
    "top_k": [-2, 0.5],
    "seed": [2**64, "s", 1.5],
    "repetition_penalty": [0, -1, 101, "high"],
    "frequency_penalty": [-101, "nan"],
    "presence_penalty": [101, []],
    "logit_bias": [{"5": 101}, {"x": 1}, {"1.5": 1}, {"100": 1}, {"-1": 1}, {"5": None}, [5], "{", 5,
                   {str(i): 0 for i in range(1025)}],
    "allowed_token_ids": [[], [100], [-1], ["5"], 5, [1] * 1025],
    "bad_words": [5, [5], ["x" * 1025], ["x"] * 65, ["\ud800"], {}],
    "stop": [5, ["a", 5], ["\ud800"], ["x" * 1025], ["x"] * 65],
    "stop_token_ids": [[1] * 1025, [100], [-1], [2**40], ["1"], [True], 5, "5", "["],
    "ignore_eos": [1, "yes", []],
    "logprobs": [-1, 21, True, "all"],
    "prompt_logprobs": [-1, 21],
    "timeout_ms": [0, -5, "soon"],
    "priority": [-101, 101, 2**31, "low"],
    "cache_salt": [5, "x" * 257, "\ud800"],
    "cache": ["off", 0],
    "speculation": ["on", 1],
    "truncate_prompt_tokens": [0, -2, "half"],
    "echo": ["no", 0],
    "guided_decoding": [{}, {"regex": "a", "json_object": True}, {"yaml": 1}, {"regex": ""}, {"json": 5},
                        {"json": "{"}, {"choice": []}, {"choice": [""]}, {"choice": "x"}, [], "x", {"json_object": 1}],
    "guided_json": ["{", 5, [1]],
    "guided_regex": [5, "x" * (2**20 + 1)],
    "guided_grammar": [{}],
    "guided_choice": [[], [5], "a"],
    "response_format": [{}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, 5],
    "guided_decoding_guide_type": ["yaml", "regex", 5],
    "guided_decoding_guide": ["a+"],
    "n": [0, 129, "x", 1.5, True],
    "best_of": [0, 129, "many"],
    "num_return_sequences": [-1, 129],
    "beam_width": [0, 129, 2.5],
    "length_penalty": [10.5, "x", "nan"],
    "early_stopping": [2, "never"],
    "use_beam_search": [1],
    "beam_search_diversity_rate": [0.5],
    "return_context_logits": [True],
    "return_generation_logits": [True],
    "lora_task_id": [0, 5],
    "lora_name": ["mine"],
    "detokenize": [False],
    "end_id": [-2, 100],
    "embedding_bias_words": [["w1"], [5]],
    "embedding_bias_weights": [[1.0], ["x"]],
    "input_lengths": [0],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_wrong_value_is_refused_by_name(parser: RequestParser, name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: ") as refused:
        with_json(parser, **{name: value})
    assert len(str(refused.value)) < 1000
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("temprature", "unknown parameter 'temprature' .did you mean 'temperature'"), ("zzz", "unknown parameter 'zzz'$")],
)
def test_an_unknown_name_is_refused(parser: RequestParser, name: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        with_json(parser, **{name: 0.5})
    with pytest.raises(InvalidRequestError, match=message):
        parse(parser, raw({name: 0.5}, text_input="w3"))


def test_a_deployment_may_only_warn_of_unknown_names(texts: Texts, caplog: pytest.LogCaptureFixture) -> None:
    lenient = make(texts, Deployment(decoupled=True, warns_of_unknown=True))
    with caplog.at_level(logging.WARNING):
        assert with_json(lenient, temprature=0.5, top_k=3).sampling.top_k == 3
    assert "unknown parameter 'temprature'" in caplog.text


def test_what_a_request_was_understood_to_ask_for_is_logged(
    parser: RequestParser, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        with_json(parser, top_k=7)
        given = {"stream": True, "priority": -3, "cache": False, "speculation": False, "cache_salt": "a\nb"}
        switches = {"timeout_ms": 250, "return_output_ids": True, "return_finish_reason": True}
        request = raw({**given, **switches}, input_ids=[4, 5])
        parse(parser, replace(request, client_id="mine\n" + "x" * 1000))
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("request 1: 1 tokens of text_input; stream=False, echo=True, priority=0, cache_salt='', "
                            "cache=True, speculation=True, timeout_ms=1000, switches=[]; SamplingParams(")  # fmt: skip
    assert "top_k=7" in first and "temperature=1.0" in first
    assert second.startswith("request 2 (the client's 'mine\\nxxx") and "\n" not in second and len(second) < 1500
    assert ("2 tokens of input_ids; stream=True, echo=False, priority=-3, cache_salt='a\\nb', cache=False, "
            "speculation=False, timeout_ms=250, switches=[finish_reason, output_ids]; ") in second  # fmt: skip


# Several sequences


@pytest.mark.parametrize(
    ("given", "branching"),
    [
        ({}, Branching()),
        ({"n": 3}, Branching(3, 3)),
        ({"n": 1, "best_of": 4}, Branching(1, 4)),
        ({"best_of": 4}, Branching(1, 4)),
        ({"beam_width": 1, "length_penalty": 0.5, "early_stopping": True, "use_beam_search": False}, Branching()),
        ({"beam_width": 4}, Branching(4, 4, 4)),
        ({"beam_width": 4, "n": 2}, Branching(2, 2, 4)),
        ({"beam_width": 4, "n": 1, "best_of": 1}, Branching(1, 1, 4)),
        ({"beam_width": 4, "length_penalty": -1, "early_stopping": "true"}, Branching(4, 4, 4, -1.0, True)),
        ({"use_beam_search": True, "beam_width": 3, "n": 1}, Branching(1, 1, 3)),
        ({"use_beam_search": True, "best_of": 4, "n": 2, "temperature": 0}, Branching(2, 2, 4)),
        ({"use_beam_search": True, "n": 2}, Branching(2, 2, 2)),
        ({"use_beam_search": True, "n": 1, "best_of": 3}, Branching(1, 1, 3)),
        (
            {"beam_width": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3,
             "repetition_penalty": 1, "presence_penalty": 0, "bad_words": [""], "stop": "",
             "stop_token_ids": [4], "logprobs": 2},
            Branching(2, 2, 2),
        ),
    ],
)  # fmt: skip
def test_how_many_sequences_an_answer_has(
    parser: RequestParser, given: dict[str, object], branching: Branching
) -> None:
    assert with_json(parser, **given).branching == branching
    assert parse(parser, raw(text_input="w3", sampling_parameters=json.dumps(given)))[1].num_sequences == branching.n


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of: got 2; allowed: at least n (3)"),
        ({"n": 65}, "n: got 65; allowed: 1 to 64 (at most 128 and max_num_seqs)"),
        ({"best_of": 65}, "best_of: got 65; allowed: 1 to 64"),
        ({"beam_width": 65, "n": 1}, "beam_width: got 65; allowed: 1 to 64"),
        ({"beam_width": 2, "n": 3}, "n: got 3; allowed: at most beam_width (2)"),
        ({"beam_width": 2, "best_of": 3}, "best_of: got 3; allowed: no value with a beam search, or its beam_width"),
        ({"use_beam_search": True}, "use_beam_search: got True; allowed: with beam_width, best_of or n above 1"),
        ({"use_beam_search": True, "beam_width": 1}, "use_beam_search: got True; allowed: with beam_width"),
        ({"use_beam_search": False, "beam_width": 2}, "use_beam_search: got False; allowed: true, or absent"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty: got 1.1; allowed: 1.0 with a beam search"),
        ({"beam_width": 2, "frequency_penalty": 0.5}, "frequency_penalty: got 0.5; allowed: 0.0 with"),
        ({"beam_width": 2, "presence_penalty": -1}, "presence_penalty: got -1.0; allowed: 0.0 with"),
        ({"beam_width": 2, "logit_bias": {"5": 1}}, "logit_bias: got ((5, 1.0),); allowed: no value with"),
        ({"beam_width": 2, "allowed_token_ids": [5]}, "allowed_token_ids: got (5,); allowed: no value with"),
        ({"beam_width": 2, "bad_words": ["w5"]}, "bad_words: got ('w5',); allowed: no value with"),
        (
            {"beam_width": 2, "embedding_bias_words": ["w5"], "embedding_bias_weights": [1]},
            "embedding_bias_words: got ('w5',); allowed: no value with",
        ),
        ({"beam_width": 2, "stop_words": ["x"]}, "stop: got ('x',); allowed: no value with a beam search"),
        ({"beam_width": 2, "guided_regex": "a"}, "guided_regex: got a guide; allowed: none with a beam search"),
        ({"stream": True, "n": 2, "best_of": 3}, "stream: got True; allowed: false with best_of above n"),
        ({"stream": True, "best_of": 2}, "stream: got True; allowed: false with best_of above n"),
        ({"stream": True, "beam_width": 2}, "stream: got True; allowed: false with best_of above n, and with a beam"),
    ],
)
def test_sequences_that_cannot_be_had_are_refused_by_name(texts: Texts, given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}"):
        with_json(make(texts, limits=replace(LIMITS, max_sequences=64)), **given)


def test_several_sequences_may_stream(parser: RequestParser) -> None:
    assert with_json(parser, stream=True, n=2, best_of=2).branching == Branching(2, 2)
    limits = Limits.of(EngineConfig(model="x", max_num_seqs=8), vocab_size=100)
    assert limits.max_sequences == 8 and Limits.of(EngineConfig(model="x", max_num_seqs=500), 100).max_sequences == 128


@pytest.mark.parametrize(
    ("given", "pad_id"), [({}, 0), ({"end_id": 9}, 9), ({"end_id": -1}, 0), ({"end_id": 9, "pad_id": -4}, -4)]
)
def test_what_fills_short_rows_of_ids(parser: RequestParser, given: dict[str, object], pad_id: int) -> None:
    assert parse(parser, raw(given, text_input="w3"))[1].pad_id == pad_id


# Prompt and echo


@pytest.mark.parametrize(
    ("flags", "prefix"),
    [
        ({}, "w3"),
        ({"exclude_input_in_output": True}, ""),
        ({"exclude_input_in_output": False}, "w3"),
        ({"echo": True}, "w3"),
        ({"echo": False}, ""),
        ({"echo": True, "exclude_input_in_output": False}, "w3"),
        ({"stream": True}, ""),
        ({"stream": True, "exclude_input_in_output": True}, ""),
        ({"stream": True, "echo": True}, "w3"),
    ],
)
def test_when_the_prompt_is_echoed(parser: RequestParser, flags: dict[str, bool], prefix: str) -> None:
    assert parse(parser, raw(text_input="w3", **flags))[1].prefix == prefix


def test_a_stream_does_not_echo_by_the_vllm_backends_field(texts: Texts) -> None:
    flags = {"stream": True, "exclude_input_in_output": False}
    with pytest.raises(InvalidRequestError, match="exclude_input_in_output: got False"):
        parse(make(texts), raw(text_input="w3", **flags))
    leading = {name: np.array([[value]]) for name, value in flags.items()}
    request = raw(text_input=np.array([[b"w3"]], dtype=object), **leading)
    assert parse(make(texts, BATCHED), request)[1].prefix == ""


def test_echo_may_not_contradict(parser: RequestParser) -> None:
    with pytest.raises(InvalidRequestError, match="echo: got True; allowed: false, or absent"):
        parse(parser, raw(text_input="w3", echo=True, exclude_input_in_output=True))


def test_a_deployment_without_decoupling_cannot_stream(texts: Texts) -> None:
    with pytest.raises(InvalidRequestError, match="stream: got True; .*decoupled: false"):
        parse(make(texts, Deployment(decoupled=False)), raw(text_input="w3", stream=True))


def test_token_ids_in_place_of_text(parser: RequestParser) -> None:
    request, options = parse(parser, raw(input_ids=np.array([7, 8], dtype=np.int32)))
    assert request.prompt_token_ids == (7, 8) and options.prefix == "w7 w8"
    assert parse(parser, raw({"input_ids": "[7, 8]"}))[0].prompt_token_ids == (7, 8)


@pytest.mark.parametrize(("keep", "expected"), [(1, (59,)), (3, (57, 58, 59)), (-1, tuple(range(11, 60)))])
def test_a_long_prompt_may_be_cut_to_its_end(parser: RequestParser, keep: int, expected: tuple[int, ...]) -> None:
    words = [f"w{i}" for i in range(60)]
    for inputs in ({"text_input": " ".join(words)}, {"input_ids": list(range(60))}):
        request, options = parse(parser, raw({"truncate_prompt_tokens": keep}, **inputs))
        assert request.prompt_token_ids == expected
        assert options.prefix == " ".join(f"w{i}" for i in expected)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "text_input, input_ids, messages: got none"),
        ({"text_input": "w1", "input_ids": [1]}, "got text_input and input_ids"),
        ({"text_input": "w1", "messages": "[]"}, "got text_input and messages"),
        ({"messages": "[]"}, "messages: got some; allowed: none, since this model has no chat template"),
        ({"text_input": "w1", "tools": "[]"}, "tools: got .* only with messages"),
        ({"text_input": ""}, "text_input: got a prompt without tokens"),
        ({"input_ids": np.array([], dtype=np.int32)}, "input_ids"),
        ({"input_ids": [100]}, "input_ids: got 100; allowed: token ids from 0 to 99"),
        ({"input_ids": [-1]}, "input_ids: got -1"),
        ({"input_ids": np.array([[1]])}, "input_ids"),
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, "text_input: got '2 elements'"),
        ({"text_input": np.array([], dtype=object)}, "text_input: got '0 elements'"),
        ({"text_input": b"\xff\xfe"}, "text_input: .*UTF-8"),
        ({"text_input": "w1", "stream": np.array([1], dtype=np.int32)}, "stream"),
        ({"text_input": "w1", "sampling_parameters": ""}, "sampling_parameters: .*JSON object"),
        ({"text_input": "w1", "sampling_parameters": "[1]"}, "sampling_parameters: .*JSON object"),
        ({"text_input": "w1", "sampling_parameters": '{"top_p": NaN}'}, "sampling_parameters: .*NaN is not JSON"),
        ({"text_input": "w1", "sampling_parameters": "[" * 100_000}, "sampling_parameters: .*too deeply nested"),
        ({"text_input": "w1 " * 1000}, "text_input: got 3000 characters"),
        ({"text_input": "w1", "sampling_parameters": f'{{"stop": [{"1," * 100_000}1]}}'}, "got JSON of more values"),
        ({"text_input": "w1", "guided_json": f"[{'[],' * 100_000}1]"}, "guided_json: got JSON of more values"),
        ({"text_input": "w1", "sampling_parameters": " " * 8_388_609}, "sampling_parameters: got 8388609 characters"),
        ({"text_input": "w1", "sampling_parameters": f'{{"top_k": {"[" * 900}{"]" * 900}}}'}, "top_k: got "),
    ],
)
def test_a_wrong_request_is_refused_by_name(parser: RequestParser, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(parser, raw(**inputs))


def test_text_keeps_its_nul_characters(parser: RequestParser) -> None:
    assert parse(parser, raw(text_input="w1 \0 w2\0\0"))[1].prefix == "w1 \0 w2\0\0"


def test_a_token_that_the_model_was_not_given_is_refused(texts: Texts) -> None:
    with pytest.raises(InvalidRequestError, match="got the token 'w95' .id 95.; allowed: .* ids 0 to 89"):
        parse(make(texts, limits=Limits(90, 16, 1000)), raw(text_input="w3 w95"))


@pytest.mark.parametrize("length", [49, 50, 5000])
def test_a_prompt_over_the_limit_is_refused_under_its_own_name(parser: RequestParser, length: int) -> None:
    for name, value in (("input_ids", np.full(length, 3)), ("text_input", " ".join(["w3"] * length))):
        if length < 50:
            assert len(parse(parser, raw(**{name: value}))[0].prompt_token_ids) == length
        else:
            with pytest.raises(InvalidRequestError, match=f"{name}: got"):
                parse(parser, raw(**{name: value}))


# TensorRT-LLM's names


def test_a_leading_dimension_of_one_is_taken_off(texts: Texts) -> None:
    parser = make(texts, BATCHED)
    inputs = {
        "input_ids": np.array([[5, 6]], np.int32), "input_lengths": np.array([[2]], np.int32),
        "request_output_len": np.array([[4]], np.int32), "stop_words": np.array([["a", ""]], object),
        "streaming": np.array([[True]]), "runtime_top_p": np.array([[0.5]], np.float32),
    }  # fmt: skip
    request, options = parse(parser, raw(**inputs))
    assert (request.prompt_token_ids, request.sampling.max_tokens, request.sampling.stop) == ((5, 6), 4, ("a",))
    assert options.stream and options.wanted == {"output_ids"} and request.sampling.top_p == 0.5
    for shape in ((2, 1), (0, 1)):
        with pytest.raises(InvalidRequestError, match="text_input: got 'the shape .*leading dimension of 1"):
            parse(parser, raw(text_input=np.full(shape, b"w3", dtype=object)))
    with pytest.raises(InvalidRequestError, match="input_lengths: got 3; allowed: the number of input_ids, 2"):
        parse(parser, raw(**{**inputs, "input_lengths": np.array([[3]], np.int32)}))


def test_an_end_of_ones_own_takes_the_place_of_the_models(parser: RequestParser) -> None:
    sampling = with_json(parser, end_id=9, stop_token_ids=[4]).sampling
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (4, 9))
    sampling = with_json(parser, end_id=-1, pad_id=-5).sampling
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, ())


def test_words_are_biased_token_by_token(parser: RequestParser) -> None:
    sampling = with_json(
        parser, embedding_bias_words=["w5 w6", "w5"], embedding_bias_weights=[2, "3"], logit_bias={"6": 1}
    ).sampling
    assert dict(sampling.logit_bias) == {5: 5.0, 6: 3.0}
    with pytest.raises(InvalidRequestError, match="embedding_bias_weights: got 120.0; allowed: -100 to 100"):
        with_json(parser, embedding_bias_words=["w5", "w5"], embedding_bias_weights=[60, 60])


@pytest.mark.parametrize(
    ("kind", "source", "guide"),
    [
        ("json", None, Guide(GuideKind.JSON_OBJECT)),
        ("json_schema", '{"type": "null"}', Guide(GuideKind.JSON_SCHEMA, '{"type": "null"}')),
        ("regex", "a+", Guide(GuideKind.REGEX, "a+")),
        ("ebnf_grammar", 'root ::= "x"', Guide(GuideKind.GRAMMAR, 'root ::= "x"')),
    ],
)
def test_a_guide_by_its_type(parser: RequestParser, kind: str, source: str | None, guide: Guide) -> None:
    given = {"guided_decoding_guide_type": kind, "guided_decoding_guide": source}
    assert with_json(parser, **given).sampling.guide == guide


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"guided_decoding": {"json": {"type": "null"}}}, Guide(GuideKind.JSON_SCHEMA, '{"type": "null"}')),
        ({"guided_decoding": {"json": "true", "regex": None}}, Guide(GuideKind.JSON_SCHEMA, "true")),
        ({"structured_outputs": {"json_object": True}}, Guide(GuideKind.JSON_OBJECT)),
        ({"guided_decoding": {"json_object": False}}, None),
        ({"guided_decoding": '{"choice": ["a"]}'}, Guide(GuideKind.CHOICE, '["a"]')),
        ({"response_format": {"type": "text"}, "guided_regex": "x"}, Guide(GuideKind.REGEX, "x")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            Guide(GuideKind.JSON_SCHEMA, '{"type": "null"}'),
        ),
    ],
)
def test_a_guide_under_each_of_its_names(parser: RequestParser, fields: dict[str, Any], guide: Guide | None) -> None:
    assert with_json(parser, **fields).sampling.guide == guide


def test_a_request_has_one_guide_and_it_is_checked_before_any_work(texts: Texts, compiler: GuideCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="guided_json, guided_regex: got 2 guides; allowed: one"):
        with_json(make(texts), guided_regex="a", guided_json={})

    parser = make(texts, check_guide=compiler.compile)
    checked = parser.check(raw({"guided_regex": "("}, text_input="w3"))
    assert checked.size > 4096, "a guide takes time"
    with pytest.raises(InvalidRequestError, match=r"^guided_regex: got '\('; allowed: .*unclosed group"):
        parser.encode(checked)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided_decoding": {"regex": "("}}, "guided_decoding"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, r"structured_outputs\.regex"),
        ({"structured_outputs": {"yaml": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs, guided_regex"),
        ({"guided_json": {"type": "strng"}}, "guided_json"),
        ({"guided_regex": "(?=a)"}, "guided_regex"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"guided_choice": ["x" * 5000]}, "guided_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("}, "guided_decoding_guide"),
        ({"guided_regex": "a" * 40000}, "guided_regex"),
    ],
)
def test_what_is_wrong_with_a_guide_is_said_of_the_field_that_the_client_used(
    texts: Texts, compiler: GuideCompiler, fields: dict[str, Any], name: str
) -> None:
    for _ in range(2):  # the second reason is one that was kept
        with pytest.raises(InvalidRequestError, match=f"^{name}: got "):
            with_json(make(texts, check_guide=compiler.compile), **fields)


def test_one_guide_under_two_names_is_refused_under_each(texts: Texts, compiler: GuideCompiler) -> None:
    parser = make(texts, check_guide=compiler.compile)
    for name in ("guided_regex", "guided_decoding", "guided_regex"):
        with pytest.raises(InvalidRequestError, match=f"^{name}: got '\\(a'"):
            with_json(parser, **{name: "(a" if name == "guided_regex" else {"regex": "(a"}})


# Switches


def test_switches_say_which_outputs_are_filled(parser: RequestParser) -> None:
    switches = [field.name for field in FIELDS if field.name.startswith("return_") and field.group is Group.REPLY]
    assert len(switches) == 11
    for switch in switches:
        for value, wanted in ((True, {switch.removeprefix("return_")}), (False, set())):
            assert parse(parser, raw(text_input="w3", **{switch: value}))[1].wanted == wanted


def test_a_sum_of_logprobs_needs_them(parser: RequestParser) -> None:
    for switch in ("return_cumulative_logprob", "return_log_probs"):
        request, options = parse(parser, raw({switch: True}, text_input="w3"))
        assert request.sampling.logprobs == 0 and not options.logprobs
        assert parse(parser, raw({switch: True, "logprobs": 2}, text_input="w3"))[0].sampling.logprobs == 2


# Whatever JSON may be


@pytest.mark.parametrize("key", [None, "stop", "logit_bias", "guided_decoding", "max_tokens"])
def test_json_test_suite_as_sampling_parameters(parser: RequestParser, key: str | None) -> None:
    """n_ files are refused; the others are parsed and then judged as parameters: refused by name, or taken."""
    for path in sorted(shared_data("json_test_suite").glob("*.json")):
        source = path.read_bytes() if key is None else b'{"%s": ' % key.encode() + path.read_bytes() + b"}"
        try:
            parse(parser, raw(text_input="w1", sampling_parameters=source))
        except InvalidRequestError as error:
            assert "sampling_parameters" in str(error) or "parameter" in str(error) or "allowed" in str(error)
            assert len(str(error)) < 2500
        else:
            assert not path.name.startswith("n_"), path.name
