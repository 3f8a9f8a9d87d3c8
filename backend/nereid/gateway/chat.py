"""POST /v1/chat/completions: messages -> n messages, each with text or calls of tools.

The messages go to the model as they are; its chat template makes the prompt of them. Without a limit of tokens the
answers may go on to the end of the model's context.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from nereid.gateway.answers import TO_THE_END, Heading, Usage, check_offered, check_sequences, new_id, switches
from nereid.gateway.chat_choice import ChatChoice
from nereid.gateway.errors import GatewayError, invalid
from nereid.gateway.messages import template_messages, template_tools
from nereid.gateway.pieces import Piece
from nereid.gateway.schemas import ChatRequest
from nereid.gateway.tool_choice import plan_tools
from nereid.gateway.tool_format import ToolFormat, forced_guide
from nereid.gateway.triton import Model, Question, Triton

Json = dict[str, object]


class Chat:
    """One request, answered once: by `events` or by `answer`. Both raise GatewayError."""

    def __init__(self, triton: Triton, model: Model, body: ChatRequest, tool_format: ToolFormat) -> None:
        """Raises GatewayError where the request asks for what is not offered, or contradicts itself."""
        check_offered(model, "messages", "messages")
        check_sequences(model, body)
        if body.logprobs:
            check_offered(model, "return_logprobs", "logprobs")
        elif body.top_logprobs is not None:
            raise invalid("top_logprobs", body.top_logprobs, "nothing unless logprobs is true")
        self._triton = triton
        self._model = model
        self._body = body
        self._format = tool_format
        self._plan = plan_tools(body)
        num_best = (body.top_logprobs or 0) if body.logprobs else None
        self._choices = [ChatChoice(index, self._plan, tool_format, num_best) for index in range(body.n)]
        self._id = new_id("chatcmpl")
        self._usage = Usage()

    async def answer(self) -> Json:
        """The whole answer."""
        heading = Heading(self._id, "chat.completion", self._model.name)
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                self._choices[piece.sequence_index].keep(piece)
        return heading.around(choices=[choice.whole for choice in self._choices], usage=self._usage.json)

    async def events(self) -> AsyncGenerator[Json, None]:
        """The answer in events, each with a part of one choice."""
        heading = Heading(self._id, "chat.completion.chunk", self._model.name)
        with_usage = self._body.stream_options.include_usage
        nothing: Json = {"usage": None} if with_usage else {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                for choice in self._choices[piece.sequence_index].events(piece):
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
        sampling: Json = {**body.engine_fields, "max_tokens": TO_THE_END if limit is None else limit}
        if plan.shown:
            sampling["tools"] = template_tools(plan.shown)
        if plan.forced:
            sampling["guided_decoding"] = forced_guide(self._format, plan.functions, parallel=plan.parallel)
        if body.logprobs:
            sampling["logprobs"] = body.top_logprobs or 0
        wanted = switches("return_logprobs", "return_output_ids") if body.logprobs else switches()
        messages = json.dumps(template_messages(body.messages))
        return Question(self._id, {"messages": messages, "stream": body.stream, **wanted}, sampling, body.n)
