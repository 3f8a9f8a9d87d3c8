"""Mailbox: what one request has gained and its client was not sent yet. Used by the sender's thread alone.

What can go out comes as Letters, each of which is one response. Invariants: of each sequence, outputs go out in their
order, and those that piled up as one; exactly one letter of a request is final, the last; it shows the request's last
output, or its failure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol

from nereid.errors import ErrorCode
from nereid.request import FinishReason, RequestFailure, RequestOutput, TokenLogprobs
from nereid.server.reply import Reply, ReplyBuilder


class ReplyChannel(Protocol):
    """The server's side of one request."""

    @property
    def trace_context(self) -> str | None:
        """Whose child the request's span is, where the server traces it."""
        ...

    def send(self, reply: Reply, *, final: bool) -> None: ...

    def fail(self, failure: RequestFailure) -> None:
        """Send an error as the final response."""
        ...

    def cancelled(self) -> bool:
        """Whether the client cancelled or left."""
        ...


@dataclass(frozen=True, slots=True)
class Letter:
    """One response. outputs: what it shows, each of another sequence, in their order.  failure: it is that error, and
    shows nothing.  reason: the finish_reason that is told in place of the outputs' own.  final: nothing follows."""

    outputs: tuple[RequestOutput, ...] = ()
    failure: RequestFailure | None = None
    reason: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended. opened: when it came here, in monotonic seconds.  last: its last output.  reasons: of its
    sequences that ended by themselves, in their order.  num_sequences: as asked for."""

    opened: float
    last: RequestOutput
    reasons: tuple[FinishReason, ...]
    num_sequences: int


class Mailbox:
    """One request's. What piles up of a sequence becomes one output."""

    def __init__(self, channel: ReplyChannel, builder: ReplyBuilder | None) -> None:
        """builder: None where nothing but a failure will come."""
        self.channel = channel
        self.builder = builder
        self.num_merged = 0
        self._streams = builder is not None and builder.options.stream
        self._opened = time.monotonic()
        self._pending: dict[int, RequestOutput] = {}  # by sequence
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # not sent yet
        self._reasons: dict[int, FinishReason] = {}
        self._last: RequestOutput | None = None
        self._ended = False  # its final letter was taken

    def put(self, output: RequestOutput) -> bool:
        """Take an output; whether it has to share a response with the one before, which could have been sent."""
        if output.final or output.failure is not None:
            self._last = output
        if output.failure is not None:
            return False
        index = output.sequence_index
        if output.finish_reason is not None:
            self._reasons[index] = output.finish_reason
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        before = self._pending.get(index)
        merges = self._streams and before is not None and bool(before.text)
        self.num_merged += merges
        self._pending[index] = output if before is None else before.merge(output)
        return merges

    def take(self) -> list[Letter]:
        """What can be sent now: new text of a stream, or the end."""
        if self._ended or (self._last is None and not (self._pending and self._streams)):
            return []
        self._ended = self._last is not None
        failure = None if self._last is None else self._last.failure
        letters = self._parts(failure) if self._streams else self._whole(failure)
        if failure is not None:
            letters.append(Letter(failure=failure, final=True))
        if self._prompt_logprobs and letters and letters[0].outputs:
            first, *others = letters[0].outputs
            told = replace(first, prompt_logprobs=self._prompt_logprobs)
            letters[0], self._prompt_logprobs = replace(letters[0], outputs=(told, *others)), ()
        return letters

    def _whole(self, failure: RequestFailure | None) -> list[Letter]:
        """All sequences as one."""
        if failure is not None:
            return []
        return [Letter(tuple(self._pending[index] for index in sorted(self._pending)), final=True)]

    def _parts(self, failure: RequestFailure | None) -> list[Letter]:
        """A letter for each sequence with something to show; what breaks off, not by the client's will, shows what was
        held back of it."""
        if failure is not None and failure.code is ErrorCode.CANCELLED:
            return []
        ready = [output for output in self._pending.values() if output.finished or output.text]
        for output in ready:
            del self._pending[output.sequence_index]
        if len(ready) > 1:
            ready.sort(key=lambda output: output.final)
        broken = None if failure is None else FinishReason.ERROR.value
        return [Letter((output,), None, None if output.finished else broken, output.final) for output in ready]

    def ending(self, failure: RequestFailure | None) -> Ending:
        """How the request ended, to be asked with its final letter. failure: what ended it, by whosoever's fault."""
        last = self._last if self._last is not None else RequestOutput(0)
        reasons = tuple(self._reasons[index] for index in sorted(self._reasons))
        asked = self.builder.options.num_sequences if self.builder is not None else 1
        return Ending(self._opened, replace(last, failure=failure), reasons, asked)
