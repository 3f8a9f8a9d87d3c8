"""POST /v1/chat/completions: messages -> a message, with text or calls of tools.

The messages go to the model as they are; its chat template makes the prompt of them. Without a limit of tokens the
answer may go on to the end of the model's context.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from nereid.gateway.answers import TO_THE_END, Heading, Usage, check_offered, finish_reason_of, new_id, switches
from nereid.gateway.call_reader import CallArguments, CallStart, Event, Text
from nereid.gateway.errors import GatewayError, invalid
from nereid.gateway.logprobs import chat_logprobs
from nereid.gateway.messages import template_messages, template_tools
from nereid.gateway.pieces import Piece, TokenLogprob
from nereid.gateway.schemas import ChatRequest
from nereid.gateway.tool_choice import plan_tools
from nereid.gateway.tool_format import ToolFormat, forced_guide
from nereid.gateway.tools import ToolParser
from nereid.gateway.triton import Model, Question, Triton

Json = dict[str, object]


class Chat:
    """One request, answered once: by `events` or by `answer`. Both raise GatewayError."""

    def __init__(self, triton: Triton, model: Model, body: ChatRequest, tool_format: ToolFormat) -> None:
        """Raises GatewayError where the request asks for what is not offered, or contradicts itself."""
        check_offered(model, "messages", "messages")
        if body.logprobs:
            check_offered(model, "return_logprobs", "logprobs")
        elif body.top_logprobs is not None:
            raise invalid("top_logprobs", body.top_logprobs, "nothing unless logprobs is true")
        self._triton = triton
        self._model = model
        self._body = body
        self._format = tool_format
        self._plan = plan_tools(body)
        self._parser = ToolParser(tool_format, self._plan.names, parallel=self._plan.parallel, forced=self._plan.forced)
        self._id = new_id("chatcmpl")
        self._usage = Usage()
        self._positions: list[TokenLogprob] = []  # of tokens whose text is held back

    async def answer(self) -> Json:
        """The whole answer."""
        heading = Heading(self._id, "chat.completion", self._model.name)
        message, reason = _Message(), None
        positions: list[TokenLogprob] = []
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                message.add(self._events_in(piece))
                positions += piece.logprobs
                reason = self._reason(piece)
        logprobs = chat_logprobs(positions, self._body.top_logprobs or 0) if self._body.logprobs else None
        choice = {"index": 0, "message": message.json, "logprobs": logprobs, "finish_reason": reason}
        return heading.around(choices=[choice], usage=self._usage.json)

    async def events(self) -> AsyncGenerator[Json, None]:
        """The answer in events: the role, then new text or parts of calls, then why it ended."""
        heading = Heading(self._id, "chat.completion.chunk", self._model.name)
        with_usage = self._body.stream_options.include_usage
        nothing: Json = {"usage": None} if with_usage else {}
        at_start = True
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if at_start:
                    at_start = False
                    role: Json = {"role": "assistant", "content": ""}
                    yield heading.around(choices=[_choice(role, None, None)], **nothing)
                for choice in self._choices(piece):
                    yield heading.around(choices=[choice], **nothing)
        if with_usage:
            yield heading.around(choices=[], usage=self._usage.json)

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        async with aclosing(self._triton.ask(self._model, self._question())) as pieces:
            try:
                async for piece in pieces:
                    self._usage.add(0, piece)
                    yield piece
            except GatewayError as error:
                if not self._plan.forced or error.param != "guided_decoding":
                    raise
                # The client knows nothing of the guide that was made of its tools.
                reason = str(error).rpartition("allowed: ")[2]
                raise GatewayError(400, f"tools: their parameters make no guide: {reason}", param="tools") from error

    def _question(self) -> Question:
        body, plan = self._body, self._plan
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        sampling: Json = {**body.passed_on, "max_tokens": TO_THE_END if limit is None else limit}
        if plan.shown:
            sampling["tools"] = template_tools(plan.shown)
        if plan.forced:
            sampling["guided_decoding"] = forced_guide(self._format, plan.functions, parallel=plan.parallel)
        if body.logprobs:
            sampling["logprobs"] = body.top_logprobs or 0
        wanted = switches("return_logprobs", "return_output_ids") if body.logprobs else switches()
        messages = json.dumps(template_messages(body.messages))
        return Question(self._id, {"messages": messages, "stream": body.stream, **wanted}, sampling)

    def _events_in(self, piece: Piece) -> list[Event]:
        """What the piece tells, and at the last one what was held back."""
        if not self._plan.functions:
            return [Text(piece.text)] if piece.text else []
        events = self._parser.feed(piece.text)
        return events if piece.finish_reason is None else [*events, *self._parser.finish()]

    def _reason(self, piece: Piece) -> str | None:
        reason = finish_reason_of(piece)
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason

    def _choices(self, piece: Piece) -> list[Json]:
        """Log-probabilities go with the first text that follows them."""
        self._positions += piece.logprobs
        deltas = [_delta(event) for event in self._events_in(piece)]
        reason = self._reason(piece)
        if reason is not None:
            deltas.append({})
        choices = [_choice(delta, None, None) for delta in deltas]
        if choices:
            choices[-1]["finish_reason"] = reason
            if self._body.logprobs and self._positions:
                choices[0]["logprobs"] = chat_logprobs(self._positions, self._body.top_logprobs or 0)
                self._positions = []
        return choices


@dataclass(slots=True)
class _Message:
    """An answer as one message."""

    _text: str = ""
    _calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                self._text += event.text
            elif isinstance(event, CallStart):
                self._calls.append((event.name, ""))
            else:
                name, arguments = self._calls[event.number]
                self._calls[event.number] = (name, arguments + event.part)

    @property
    def json(self) -> Json:
        content = self._text if self._text or not self._calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        calls = [_call(name, arguments) for name, arguments in self._calls]
        return {**message, "tool_calls": calls} if calls else message


def _choice(delta: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _delta(event: Event) -> Json:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.number, "function": {"arguments": event.part}}]}
    return {"tool_calls": [{"index": event.number, **_call(event.name, "")}]}


def _call(name: str, arguments: str) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
