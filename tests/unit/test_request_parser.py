"""The request parser and the parameters, without a server: every accepted form, every refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from nereid.errors import InvalidRequestError
from nereid.request import Request, SamplingParams
from nereid.server.parameters import Limits, parse_parameters
from nereid.server.request_parser import RawRequest, ReplyOptions, RequestParser
from nereid.tokenization.tokenizer import Tokenizer
from tests.conftest import shared_data

LIMITS = Limits(vocab_size=100, default_max_tokens=16, default_timeout_ms=1000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words "w0" to "w99" as ids 0 to 99."""
    library = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    folder: Path = tmp_path_factory.mktemp("words")
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture
def parser(tokenizer: Tokenizer) -> RequestParser:
    return RequestParser(tokenizer, LIMITS, max_model_len=50, decoupled=True)


def raw(_parameters: dict[str, object] | None = None, /, **inputs: Any) -> RawRequest:
    arrays = {}
    for name, value in inputs.items():
        if isinstance(value, (str, bytes)):
            arrays[name] = np.array([value.encode() if isinstance(value, str) else value], dtype=object)
        else:
            arrays[name] = np.asarray(value if isinstance(value, (list, np.ndarray)) else [value])
    return RawRequest(arrays, _parameters or {}, arrival_time=5.0)


def parse(parser: RequestParser, request: RawRequest) -> tuple[Request, ReplyOptions]:
    return parser.encode(parser.check(request))


def sampling(**given: object) -> SamplingParams:
    return parse_parameters(given, LIMITS)[0]


def test_the_plain_request(parser: RequestParser) -> None:
    request, options = parse(parser, raw(text_input="w3 w4"))
    assert request.prompt_token_ids == (3, 4) and request.deadline == 6.0
    assert request.sampling.max_tokens == 16 and request.sampling.temperature == 1.0
    assert options == ReplyOptions(False, "w3 w4", False, False, False, 2)


@pytest.mark.parametrize(
    ("stream", "exclude", "prefix"),
    [(False, None, "w3"), (False, True, ""), (False, False, "w3"), (True, None, ""), (True, True, "")],
)
def test_when_the_prompt_is_echoed(parser: RequestParser, stream: bool, exclude: bool | None, prefix: str) -> None:
    flags = {"stream": stream} | ({} if exclude is None else {"exclude_input_in_output": exclude})
    assert parse(parser, raw(text_input="w3", **flags))[1].prefix == prefix


def test_a_stream_cannot_echo(parser: RequestParser) -> None:
    with pytest.raises(InvalidRequestError, match="exclude_input_in_output: got False"):
        parse(parser, raw(text_input="w3", stream=True, exclude_input_in_output=False))


def test_a_deployment_without_decoupling_cannot_stream(tokenizer: Tokenizer) -> None:
    parser = RequestParser(tokenizer, LIMITS, max_model_len=50, decoupled=False)
    with pytest.raises(InvalidRequestError, match="stream: got True; .*decoupled: false"):
        parse(parser, raw(text_input="w3", stream=True))


def test_token_ids_in_place_of_text(parser: RequestParser) -> None:
    request, options = parse(parser, raw(input_ids=np.array([7, 8], dtype=np.int32)))
    assert request.prompt_token_ids == (7, 8) and options.prefix == "w7 w8"


def test_parameters_come_from_the_json_or_else_from_the_request(parser: RequestParser) -> None:
    parameters: dict[str, object] = {"max_tokens": 3, "timeout_ms": 2000, "triton_enable_empty_final_response": True}
    request, _ = parse(parser, raw(parameters, text_input="w3"))
    assert (request.sampling.max_tokens, request.deadline) == (3, 7.0)
    request, _ = parse(parser, raw(parameters, text_input="w3", sampling_parameters='{"top_k": 4}'))
    assert (request.sampling.max_tokens, request.sampling.top_k, request.deadline) == (16, 4, 7.0)


@pytest.mark.parametrize("form", [list, lambda values: {k: json.dumps(v) for k, v in values}])
def test_numbers_may_come_as_strings(form: object) -> None:
    values = {"max_tokens": 8, "temperature": 0.5, "top_k": 3, "top_p": 1, "seed": 2**64 - 1, "ignore_eos": True}
    given = dict(form(values.items()))  # type: ignore[operator]
    params = sampling(**given)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (8, 0.5, 3, 1.0)
    assert (params.seed, params.ignore_eos) == (2**64 - 1, True)


def test_null_is_not_given_and_seeds_differ() -> None:
    params = sampling(max_tokens=None, temperature=None)
    assert params.max_tokens == 16 and params.temperature == 1.0
    assert sampling().seed != sampling().seed


@pytest.mark.parametrize("value", [1, 2**31, 10**18, "1e18", 7.0])
def test_max_tokens_may_be_huge(value: object) -> None:
    assert sampling(max_tokens=value).max_tokens == int(float(value))  # type: ignore[arg-type]


def test_stops_as_text_or_list() -> None:
    assert sampling(stop="a").stop == ("a",)
    assert sampling(stop=["a", "bc"]).stop == ("a", "bc")
    assert sampling(stop=[]).stop == ()
    assert sampling(stop_token_ids=[1, 99]).stop_token_ids == (1, 99)
    assert sampling(stop_token_ids="[1, 99, 1]").stop_token_ids == (1, 99)


WRONG_VALUES: dict[str, list[object]] = {
    "max_tokens": [0, -1, "x", 1.5, True, [1], "", float("nan"), {}],
    "min_tokens": [-1, 17, "none"],
    "temperature": [-0.1, "hot", float("inf"), "nan", 1e7, False],
    "top_p": [-0.1, 1.1, []],
    "min_p": [-1e-9, 2],
    "top_k": [-2, 0.5],
    "seed": [2**64, "s", 1.5],
    "stop": ["", [""], ["", "x"], 5, ["a", 5], ["\ud800"], ["x" * 1025], ["x"] * 65],
    "stop_token_ids": [[1] * 1025, [100], [-1], [2**40], ["1"], [True], 5, "5", "["],
    "ignore_eos": [1, "yes", []],
    "timeout_ms": [0, -5, "soon"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG_VALUES for value in WRONG_VALUES[name]])
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}.*allowed: "):
        sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "message"),
    [("temprature", "unknown parameter 'temprature' .did you mean 'temperature'"), ("zzz", "known: ignore_eos, max")],
)
def test_an_unknown_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        sampling(**{name: 0.5})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "text_input, input_ids: got neither"),
        ({"text_input": "w1", "input_ids": [1]}, "got both"),
        ({"text_input": ""}, "text_input: got a prompt without tokens"),
        ({"input_ids": np.array([], dtype=np.int32)}, "input_ids"),
        ({"input_ids": [100]}, "input_ids: got 100; allowed: token ids from 0 to 99"),
        ({"input_ids": [-1]}, "input_ids: got -1"),
        ({"input_ids": np.array([[1]])}, "input_ids"),
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, "text_input: got '2 elements'"),
        ({"text_input": np.array([], dtype=object)}, "text_input: got '0 elements'"),
        ({"text_input": b"\xff\xfe"}, "text_input: .*UTF-8"),
        ({"text_input": "w1", "stream": np.array([1], dtype=np.int32)}, "stream"),
        ({"text_input": "w1", "sampling_parameters": "[1]"}, "sampling_parameters: .*JSON object"),
        ({"text_input": "w1", "sampling_parameters": '{"top_p": NaN}'}, "sampling_parameters: .*NaN is not JSON"),
        ({"text_input": "w1", "sampling_parameters": "[" * 100_000}, "sampling_parameters: .*too deeply nested"),
        ({"text_input": "w1 " * 1000}, "text_input: got 3000 characters"),
    ],
)
def test_a_wrong_request_is_refused_by_name(parser: RequestParser, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(parser, raw(**inputs))


def test_text_keeps_its_nul_characters(parser: RequestParser) -> None:
    assert parse(parser, raw(text_input="w1 \0 w2\0\0"))[1].prefix == "w1 \0 w2\0\0"


def test_json_test_suite_as_sampling_parameters(parser: RequestParser) -> None:
    """n_ files are refused; the others are parsed and then judged as parameters: refused by name, or taken."""
    for path in sorted(shared_data("json_test_suite").glob("*.json")):
        try:
            parse(parser, raw(text_input="w1", sampling_parameters=path.read_bytes()))
        except InvalidRequestError as error:
            assert "sampling_parameters" in str(error) or "parameter" in str(error) or "allowed" in str(error)
            assert len(str(error)) < 2000
        else:
            assert not path.name.startswith("n_"), path.name


def test_a_token_that_the_model_was_not_given_is_refused(tokenizer: Tokenizer) -> None:
    parser = RequestParser(tokenizer, Limits(90, 16, 1000), max_model_len=50, decoupled=True)
    with pytest.raises(InvalidRequestError, match="got the token 'w95' .id 95.; allowed: .* ids 0 to 89"):
        parse(parser, raw(text_input="w3 w95"))


@pytest.mark.parametrize("length", [49, 50, 5000])
def test_a_prompt_over_the_limit_is_refused_under_its_own_name(parser: RequestParser, length: int) -> None:
    for name, value in (("input_ids", np.full(length, 3)), ("text_input", " ".join(["w3"] * length))):
        if length < 50:
            assert len(parse(parser, raw(**{name: value}))[0].prompt_token_ids) == length
        else:
            with pytest.raises(InvalidRequestError, match=f"{name}: got"):
                parse(parser, raw(**{name: value}))
