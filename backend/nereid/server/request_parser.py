"""RequestParser: what a client sent -> a Request for the engine and how to answer it, or a typed error for it alone.

Pure but for the counter of request ids. Takes plain values (numpy arrays, a dict): no server is needed to test it.
Joins the rooms that know one thing each: `sources` (fields), `prompt`, `parameters`, `guides`, `reply`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError, shorten
from nereid.request import Branching, Guide, Request, SamplingParams
from nereid.server.branching import branching_of
from nereid.server.guides import NamedGuide, read_guide
from nereid.server.parameters import Limits, sampling_of
from nereid.server.prompt import Prompt, PromptReader
from nereid.server.reply import ReplyBuilder, ReplyOptions
from nereid.server.sources import RawRequest, read_fields
from nereid.server.texts import Texts

_LOG = logging.getLogger(__name__)
_SWITCH = "return_"
# Making a guide ready takes as long as a long prompt.
_GUIDE_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a model's config.pbtxt and settings say of its requests.

    decoupled: more than one response may be sent.  batched: tensors have a leading dimension, as those of
    TensorRT-LLM's clients.  warns_of_unknown: unknown parameters are not refused.
    """

    decoupled: bool
    batched: bool = False
    warns_of_unknown: bool = False

    @classmethod
    def of(cls, triton_config: Mapping[str, Any], config: EngineConfig) -> Deployment:
        """triton_config: Triton's configuration of the model, with all that was supplied to it."""
        return cls(
            decoupled=bool(triton_config.get("model_transaction_policy", {}).get("decoupled", False)),
            batched=bool(triton_config.get("max_batch_size")),
            warns_of_unknown=config.unknown_parameters == "warn",
        )


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose every field is right, but for what its encoding brings to light.

    fields: what the client said, by field.  guide: that of `sampling`, with its name.  deadline: monotonic seconds.
    echo: each text begins with the prompt.  client_id: as RawRequest has it.
    """

    fields: Mapping[str, Any]
    prompt: Prompt
    sampling: SamplingParams
    branching: Branching
    guide: NamedGuide | None
    arrival_time: float
    deadline: float
    stream: bool
    echo: bool
    client_id: str

    @property
    def size(self) -> int:
        """How much there is to encode, in characters, about."""
        return self.prompt.size + (0 if self.guide is None else _GUIDE_SIZE)


class RequestParser:
    """Checks requests against one model."""

    def __init__(
        self,
        limits: Limits,
        texts: Texts,
        deployment: Deployment,
        *,
        max_model_len: int,
        block_size: int,
        check_guide: Callable[[Guide, str], object] | None = None,
    ) -> None:
        """max_model_len, block_size: in tokens.  check_guide: given a guide and the name of its field, raises
        InvalidRequestError for one that cannot be followed; None takes every guide."""
        self._limits = limits
        self._texts = texts
        self._deployment = deployment
        self._prompts = PromptReader(texts.tokenizer, texts.chat, limits, max_model_len)
        self._block_size = block_size
        self._check_guide = check_guide
        self._ids = itertools.count(1)

    def check(self, raw: RawRequest) -> CheckedRequest:
        """Everything but the encoding, which may take long. Raises InvalidRequestError."""
        deployment = self._deployment
        fields = read_fields(raw, batched=deployment.batched, warn_of_unknown=deployment.warns_of_unknown)
        prompt = self._prompts.check(fields)
        stream = fields.get("stream", False)
        if stream and not deployment.decoupled:
            raise InvalidRequestError.of_field("stream", True, "false: this model is deployed with decoupled: false")
        timeout_ms = fields.get("timeout_ms", self._limits.default_timeout_ms)
        guide = read_guide(fields)
        return CheckedRequest(
            fields,
            prompt,
            sampling_of(fields, self._limits, guide.guide if guide else None),
            branching_of(
                fields, max_sequences=self._limits.max_sequences, guide=guide.name if guide else None, stream=stream
            ),
            guide,
            arrival_time=raw.arrival_time,
            deadline=raw.arrival_time + timeout_ms / 1e3,
            stream=stream,
            echo=self._echo(fields, stream=stream),
            client_id=raw.client_id,
        )

    def _echo(self, fields: Mapping[str, Any], *, stream: bool) -> bool:
        """By default a single response to a text begins with it, as the vLLM backend's does; a stream and the answer to
        messages do not."""
        echo, exclude = fields.get("echo"), fields.get("exclude_input_in_output")
        if echo is not None and exclude is not None and echo is exclude:
            allowed = f"{str(not exclude).lower()}, or absent, with exclude_input_in_output {str(exclude).lower()}"
            raise InvalidRequestError.of_field("echo", echo, allowed)
        if echo is not None:
            return bool(echo)
        # TensorRT-LLM's clients always say it, and mean nothing by it in a stream.
        if stream and exclude is False and not self._deployment.batched:
            raise InvalidRequestError.of_field("exclude_input_in_output", False, "true, or absent, in a stream")
        return not stream and not exclude and "messages" not in fields

    def encode(self, checked: CheckedRequest) -> tuple[Request, ReplyBuilder]:
        """The engine's request, and what makes its responses. Raises InvalidRequestError."""
        fields = checked.fields
        sampling = self._with_words(checked.sampling, fields)
        if checked.guide is not None and self._check_guide is not None:
            self._check_guide(checked.guide.guide, checked.guide.name)
        token_ids, text = self._prompts.encode(checked.prompt, echo=checked.echo)
        request = Request(
            next(self._ids),
            token_ids,
            sampling,
            checked.arrival_time,
            deadline=checked.deadline,
            priority=fields.get("priority", 0),
            cache_salt=fields.get("cache_salt", ""),
            cache=fields.get("cache", True),
            speculation=fields.get("speculation", True),
            branching=checked.branching,
        )
        options = ReplyOptions(
            checked.stream,
            text,
            len(token_ids),
            frozenset(name.removeprefix(_SWITCH) for name in fields if name.startswith(_SWITCH) and fields[name]),
            logprobs="logprobs" in fields,
            prompt_logprobs=sampling.prompt_logprobs is not None,
            num_sequences=checked.branching.n,
            pad_id=fields.get("pad_id", max(0, fields.get("end_id", 0))),
        )
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("%s", _understood(request, checked, options))
        return request, ReplyBuilder(options, self._texts.spell, self._block_size)

    def _with_words(self, sampling: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
        """The words that are banned or biased, as token ids."""
        if words := fields.get("bad_words"):
            sampling = replace(sampling, bad_words=self._texts.word_ids(words))
        words, weights = fields.get("embedding_bias_words", ()), fields.get("embedding_bias_weights", ())
        if len(words) != len(weights):
            allowed = f"as many as embedding_bias_words, {len(words)}"
            raise InvalidRequestError.of_field("embedding_bias_weights", f"{len(weights)} weights", allowed)
        if not words:
            return sampling
        biases = defaultdict(float, sampling.logit_bias)
        for ids, weight in zip(self._texts.literal.encode_texts(words), weights, strict=True):
            for token_id in set(ids):
                biases[token_id] += weight
        for bias in biases.values():
            if not -100 <= bias <= 100:
                raise InvalidRequestError.of_field("embedding_bias_weights", bias, "-100 to 100 for each token")
        return replace(sampling, logit_bias=tuple(biases.items()))


def _understood(request: Request, checked: CheckedRequest, options: ReplyOptions) -> str:
    """What a request asks for, with all that it left to defaults, in one line."""
    whose = f" (the client's {shorten(checked.client_id)})" if checked.client_id else ""
    timeout_ms = round((checked.deadline - checked.arrival_time) * 1e3)
    return (
        f"request {request.request_id}{whose}: {options.num_input_tokens} tokens of {checked.prompt.field}; "
        f"stream={checked.stream}, echo={checked.echo}, priority={request.priority}, "
        f"cache_salt={request.cache_salt!r}, cache={request.cache}, speculation={request.speculation}, "
        f"timeout_ms={timeout_ms}, switches=[{', '.join(sorted(options.wanted))}]; {request.sampling}, "
        f"{request.branching}"
    )
