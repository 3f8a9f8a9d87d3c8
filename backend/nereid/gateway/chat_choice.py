"""ChatChoice: one of a chat's answers, from the pieces of its sequence: as a message, or as events.

Owns what its tools' parser holds back, and the log-probabilities of tokens whose text is held back.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from nereid.gateway.answers import finish_reason_of
from nereid.gateway.call_reader import CallArguments, CallStart, Event, Text
from nereid.gateway.logprobs import chat_logprobs
from nereid.gateway.pieces import Piece, TokenLogprob
from nereid.gateway.tool_choice import ToolPlan
from nereid.gateway.tool_format import ToolFormat
from nereid.gateway.tools import ToolParser

Json = dict[str, object]


class ChatChoice:
    """Fed with its pieces in their order: by `events`, or by `keep`, after the last of which `whole` is the answer."""

    def __init__(self, index: int, plan: ToolPlan, tool_format: ToolFormat, num_best: int | None) -> None:
        """num_best: how many of the likeliest tokens are told at each position; None: no log-probabilities are."""
        self._index = index
        self._has_tools = bool(plan.functions)
        self._parser = ToolParser(tool_format, plan.names, parallel=plan.parallel, forced=plan.forced)
        self._num_best = num_best
        self._message = _Message()
        self._reason: str | None = None
        self._positions: list[TokenLogprob] = []  # not told yet
        self._at_start = True

    def keep(self, piece: Piece) -> None:
        self._message.add(self._events_in(piece))
        self._positions += piece.logprobs
        self._reason = self._reason_of(piece)

    @property
    def whole(self) -> Json:
        """The choice that the pieces kept make."""
        logprobs = None if self._num_best is None else chat_logprobs(self._positions, self._num_best)
        return {
            "index": self._index, "message": self._message.json, "logprobs": logprobs, "finish_reason": self._reason,
        }  # fmt: skip

    def events(self, piece: Piece) -> list[Json]:
        """What the piece adds to the choice: at its start the role, then new text or parts of calls, at its end the
        reason. Log-probabilities go with the first text that follows them."""
        self._positions += piece.logprobs
        deltas = [_delta(event) for event in self._events_in(piece)]
        reason = self._reason_of(piece)
        if reason is not None:
            deltas.append({})
        choices = [self._choice(delta) for delta in deltas]
        if choices:
            choices[-1]["finish_reason"] = reason
            if self._num_best is not None and self._positions:
                choices[0]["logprobs"] = chat_logprobs(self._positions, self._num_best)
                self._positions = []
        if self._at_start:
            self._at_start = False
            choices.insert(0, self._choice({"role": "assistant", "content": ""}))
        return choices

    def _choice(self, delta: Json) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _events_in(self, piece: Piece) -> list[Event]:
        """What the piece tells, and at the last one what was held back."""
        if not self._has_tools:
            return [Text(piece.text)] if piece.text else []
        events = self._parser.feed(piece.text)
        return events if piece.finish_reason is None else [*events, *self._parser.finish()]

    def _reason_of(self, piece: Piece) -> str | None:
        reason = finish_reason_of(piece)
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason


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


def _delta(event: Event) -> Json:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.number, "function": {"arguments": event.part}}]}
    return {"tool_calls": [{"index": event.number, **_call(event.name, "")}]}


def _call(name: str, arguments: str) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
