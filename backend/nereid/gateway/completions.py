"""POST /v1/completions: prompts as text or token ids -> texts, n choices a prompt.

`echo` puts the prompt before the text. With it and `logprobs`, `max_tokens: 0` asks how likely the prompt is: the
engine then makes one token, which is dropped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from nereid.gateway.answers import Heading, Usage, check_offered, check_sequences, finish_reason_of, new_id, switches
from nereid.gateway.errors import invalid
from nereid.gateway.logprobs import CompletionLogprobs, with_first_token
from nereid.gateway.merging import merged
from nereid.gateway.pieces import Piece, TokenLogprob
from nereid.gateway.schemas import CompletionRequest
from nereid.gateway.triton import Model, Question, Triton

_DEFAULT_MAX_TOKENS = 16
Json = dict[str, object]


class Completion:
    """One request, answered once: by `events` or by `answer`. Both raise GatewayError."""

    def __init__(self, triton: Triton, model: Model, body: CompletionRequest) -> None:
        """Raises GatewayError where the model does not offer what is asked for."""
        self._triton = triton
        self._model = model
        self._body = body
        self._usage = Usage()
        self._heading = Heading(new_id("cmpl"), "text_completion", model.name)
        self._prompts = [_Prompt(number, prompt, body) for number, prompt in enumerate(body.prompt)]
        check_sequences(model, body)
        if body.logprobs is not None:
            check_offered(model, "return_logprobs", "logprobs")
            if body.echo:
                check_offered(model, "return_prompt_logprobs", "echo")
        elif body.max_tokens == 0:
            raise invalid("max_tokens", 0, "at least 1; 0 with echo and logprobs")

    async def answer(self) -> Json:
        """The whole answer."""
        async with aclosing(self._deltas()) as deltas:
            async for choice, delta in deltas:
                choice.keep(delta)
        choices = [choice.whole for prompt in self._prompts for choice in prompt.choices]
        return self._heading.around(choices=choices, usage=self._usage.json)

    async def events(self) -> AsyncGenerator[Json, None]:
        """The answer in events, each with new text of one choice."""
        with_usage = self._body.stream_options.include_usage
        nothing: Json = {"usage": None} if with_usage else {}
        async with aclosing(self._deltas()) as deltas:
            async for _choice, delta in deltas:
                yield self._heading.around(choices=[delta], **nothing)
        if with_usage:
            yield self._heading.around(choices=[], usage=self._usage.json)

    async def _deltas(self) -> AsyncGenerator[tuple[_Choice, Json], None]:
        answers = [self._triton.ask(self._model, prompt.question(self._heading.id)) for prompt in self._prompts]
        async with aclosing(merged(answers)) as pieces:
            async for number, piece in pieces:
                choice, kept = self._prompts[number].read(piece)
                self._usage.add(number, kept)
                yield choice, choice.delta(kept)


class _Prompt:
    """One prompt: what the model is asked of it, and its choices."""

    def __init__(self, number: int, prompt: str | list[int], body: CompletionRequest) -> None:
        self._number = number
        self._prompt = prompt
        self._body = body
        self._drops_text = body.echo and body.max_tokens == 0
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self.choices = [_Choice(number * body.n + index, prompt, body) for index in range(body.n)]

    def question(self, request_id: str) -> Question:
        """What the model is asked. request_id: of the whole request."""
        body = self._body
        most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling: Json = {**body.engine_fields, "max_tokens": 1 if self._drops_text else most}
        wanted: list[str] = []
        if body.logprobs is not None:
            sampling["logprobs"] = body.logprobs
            wanted += ["return_logprobs", "return_output_ids"]
            if body.echo:
                sampling["prompt_logprobs"] = body.logprobs
                wanted.append("return_prompt_logprobs")
        prompt = "text_input" if isinstance(self._prompt, str) else "input_ids"
        # Only the engine knows the text of a prompt of ids. It puts it before a single response, not into a stream.
        engine_echoes = body.echo and prompt == "input_ids"
        flags = {"stream": body.stream and not engine_echoes, "exclude_input_in_output": not engine_echoes}
        tensors = {prompt: self._prompt, **switches(*wanted), **flags}
        return Question(f"{request_id}-{self._number}", tensors, sampling, body.n)

    def read(self, piece: Piece) -> tuple[_Choice, Piece]:
        """Which choice the piece is of, and what of it is shown."""
        self._logprobs = self._logprobs or piece.prompt_logprobs  # they come once, and are each choice's
        return self.choices[piece.sequence_index], self._wanted(replace(piece, prompt_logprobs=self._logprobs))

    def _wanted(self, piece: Piece) -> Piece:
        """`piece` without its tokens where only the prompt is asked for; an engine that echoed has put it before."""
        if not self._drops_text:
            return piece
        text = "" if isinstance(self._prompt, str) else _echoed(piece)
        return replace(piece, text=text, logprobs=(), num_output_tokens=0)


class _Choice:
    """One answer to one prompt."""

    def __init__(self, index: int, prompt: str | list[int], body: CompletionRequest) -> None:
        self._index = index
        self._prompt = prompt
        self._echo = body.echo
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(body.logprobs)
        self._kept: list[Json] = []
        self._at_start = True

    def delta(self, piece: Piece) -> Json:
        """What `piece` adds to the choice, as the client sees it."""
        text, positions = piece.text, piece.logprobs
        if self._at_start and self._echo:
            prompt = self._prompt if isinstance(self._prompt, str) else _echoed(piece)
            text = prompt + text if isinstance(self._prompt, str) else text
            positions = (*with_first_token(piece.prompt_logprobs, prompt), *positions)
        self._at_start = False
        logprobs = self._logprobs.take(positions) if self._logprobs else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason_of(piece)}

    def keep(self, delta: Json) -> None:
        """Remember a delta for `whole`."""
        self._kept.append(delta)

    @property
    def whole(self) -> Json:
        """All deltas that were kept, as one."""
        text = "".join(str(delta["text"]) for delta in self._kept)
        parts = [part for delta in self._kept if isinstance(part := delta["logprobs"], dict)]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]} if parts else None
        return {**self._kept[-1], "text": text, "logprobs": logprobs}


def _echoed(piece: Piece) -> str:
    """The prompt at the beginning of the text of an engine that echoes, where its tokens' log-probabilities tell of it.

    Tokens that are parts of characters spell no text one by one: so the prompt is looked for before what was generated.
    """
    others = "".join(position.token for position in piece.prompt_logprobs[1:])
    found = piece.text.find(others) if others else -1
    if found >= 0:
        return piece.text[: found + len(others)]
    return piece.text.removesuffix("".join(position.token for position in piece.logprobs))
