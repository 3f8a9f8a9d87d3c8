"""What clients may send: OpenAI's requests, and the engine's own fields beside them.

Three kinds of fields. Declared here: those that the gateway itself acts on. `_PASSED_ON`: handed to the engine as they
are, which checks them and names them in its errors. `_IGNORED`: without influence on the answer. Every other name is
refused, unless its value is null, which stands for "not given".
"""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from nereid.errors import shorten
from nereid.gateway.errors import UNKNOWN_FIELD, GatewayError, of_validation, unknown_field

_BEAMS = frozenset({"beam_width", "use_beam_search"})
_PASSED_ON = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "response_format",
    "guided_decoding", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "priority", "cache_salt", "cache", "speculation", "timeout_ms", "length_penalty", "early_stopping",
}) | _BEAMS  # fmt: skip
_CHAT_PASSED_ON = frozenset({"chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
GUIDES = frozenset({
    "response_format", "guided_decoding", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar",
})  # fmt: skip
"""Fields that say what the text must be like."""

MAX_PROMPTS = MAX_CHOICES = 128
_MOST_ID = (1 << 31) - 1  # of the tensor that takes ids; what is no token of the model the engine refuses
_MAX_TOOLS = 128
_FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class _Part(BaseModel):
    """A part of a request. As in the whole, null is "not given", and a key that means nothing is refused, but for
    those of `ignored`, which have no influence on the answer."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    ignored: ClassVar[Set[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None and name not in cls.ignored}
        for name in given:
            if name not in cls.model_fields:
                context = {"name": name, "known": tuple(cls.model_fields)}
                raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", context)
        return given


class StreamOptions(_Part):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class Function(_Part):
    """A function that the model may call. parameters: a JSON schema of its arguments, an object."""

    ignored = frozenset({"strict"})

    name: Annotated[str, Field(pattern=_FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Part):
    ignored = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


class FunctionName(_Part):
    name: str


class NamedTool(_Part):
    type: Literal["function"] = "function"
    function: FunctionName


class _Request(BaseModel):
    """The fields of both kinds of requests."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: int | None = None

    @property
    def passed_on(self) -> dict[str, Any]:
        """The fields that are the engine's, by name."""
        return dict(self.model_extra or {})

    @property
    def engine_fields(self) -> dict[str, Any]:
        """What the engine is told under its own names: the fields that are handed on, and how many sequences."""
        # A beam search would answer with all its beams otherwise.
        says_n = self.n > 1 or bool(_BEAMS & self.passed_on.keys())
        return {**self.passed_on, "n": self.n} if says_n else self.passed_on


def _prompts(given: object) -> list[object]:
    """The prompts in what OpenAI allows `prompt` to be."""
    prompts = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not 1 <= len(prompts) <= MAX_PROMPTS or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise ValueError(f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these")
    return prompts


def _is_ids(given: object) -> bool:
    ids = given if isinstance(given, list) else []
    return bool(ids) and all(type(token_id) is int and 0 <= token_id <= _MOST_ID for token_id in ids)


class CompletionRequest(_Request):
    """POST /v1/completions. prompt: each text or list of token ids is one; it is answered by n choices of its own."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def engine_fields(self) -> dict[str, Any]:
        fields = super().engine_fields
        return fields if self.best_of is None else {**fields, "best_of": self.best_of}


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] = ["text"]


Body = TypeVar("Body", bound=_Request)


def checked(kind: type[Body], values: object) -> Body:
    """`values`, a parsed JSON body, as a request. Raises GatewayError (400) that names the field."""
    if not isinstance(values, dict):
        raise GatewayError(400, f"body: got {shorten(values)}; allowed: a JSON object", code="invalid_value")
    given = {name: value for name, value in values.items() if value is not None and name not in _IGNORED}
    known = {*kind.model_fields, *_PASSED_ON, *(_CHAT_PASSED_ON if kind is ChatRequest else ())}
    for name in given:
        if name not in known:
            raise unknown_field("", name, known)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise of_validation(error) from error
