"""ResponseStream: outputs of the engine -> responses of the server. Owns a mailbox for each request and the one thread
that sends.

The engine's thread only puts outputs into a queue. Where the sender falls behind, what has piled up for a request is
merged into one response, so that slow clients never slow the engine. Invariants: exactly one final response a request,
on its last data; nothing is sent after it; a request whose client is gone is cancelled in the engine. A channel is
asked whether it is cancelled by the thread that sends, and never after its final response: server 2.51 crashes
otherwise.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from nereid.errors import ErrorCode
from nereid.request import FinishReason, RequestFailure, RequestOutput
from nereid.server.outcomes import Outcomes
from nereid.server.reply import Reply, ReplyBuilder

_LOG = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.05
_POLL_COST_S = 100e-6  # of one `cancelled`, measured
_POLL_SHARE = 0.05  # of this thread's time at most

# The server's trace context, when the request came here (monotonic seconds), its last output.
Trace = Callable[[str, float, RequestOutput], None]


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


@dataclass(slots=True)
class _Mailbox:
    channel: ReplyChannel
    builder: ReplyBuilder | None  # None: nothing but a failure will come
    pending: RequestOutput | None = None
    num_merged: int = 0
    opened: float = field(default_factory=time.monotonic)

    @property
    def streams(self) -> bool:
        return self.builder is not None and self.builder.options.stream

    def put(self, output: RequestOutput) -> bool:
        """Take an output; whether it has to share a response with the one before, which could have been sent."""
        merges = self.streams and self.pending is not None and bool(self.pending.text)
        self.num_merged += merges
        self.pending = output if self.pending is None else self.pending.merge(output)
        return merges

    def take_ready(self) -> RequestOutput | None:
        """What can be sent now: the end, or new text of a stream."""
        pending = self.pending
        if pending is None or not (pending.finished or (self.streams and pending.text)):
            return None
        self.pending = None
        return pending


class ResponseStream:
    """One a model. `emit` is the engine's; `register` comes before the request's submission."""

    def __init__(self, cancel: Callable[[int], None], outcomes: Outcomes, trace: Trace | None = None) -> None:
        """cancel: ends a request, by id, in the engine.  outcomes: counts what is sent.  trace: hears of their ends."""
        self._cancel = cancel
        self._outcomes = outcomes
        self._trace = trace
        self._queue: queue.SimpleQueue[tuple[RequestOutput, ...] | None] = queue.SimpleQueue()
        self._mailboxes: dict[int, _Mailbox] = {}
        self._refused_ids = itertools.count(-1, -1)  # the engine's are positive
        self._next_poll = 0.0
        self._thread = threading.Thread(target=self._loop, name="nereid-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, request_id: int, channel: ReplyChannel, builder: ReplyBuilder | None) -> None:
        """Make a mailbox; its channel is let go with the final response."""
        self._mailboxes[request_id] = _Mailbox(channel, builder)

    def refuse(self, channel: ReplyChannel, failure: RequestFailure) -> None:
        """End a request that never reached the engine; by the sender, as all others, and not from within `execute`."""
        request_id = next(self._refused_ids)
        self.register(request_id, channel, None)
        self.emit((RequestOutput(request_id, failure=failure),))

    def emit(self, outputs: tuple[RequestOutput, ...]) -> None:
        """Take outputs; never blocks."""
        self._queue.put(outputs)

    def close(self, timeout_s: float) -> None:
        """Send what is there, then end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while self._collect():
            try:
                self._flush()
                self._poll()
            except Exception:  # this thread serves all requests: nothing may end it
                _LOG.exception("the sender met an error")

    def _collect(self) -> bool:
        """Wait for outputs, and put all that are there into their mailboxes. False once closed."""
        try:
            outputs = self._queue.get(timeout=_POLL_INTERVAL_S)
            while outputs is not None:
                for output in outputs:
                    if (mailbox := self._mailboxes.get(output.request_id)) and mailbox.put(output):
                        self._outcomes.merged()
                outputs = self._queue.get_nowait()
            self._flush()
            return False
        except queue.Empty:
            return True

    def _flush(self) -> None:
        for request_id, mailbox in list(self._mailboxes.items()):
            if output := mailbox.take_ready():
                self._send(request_id, mailbox, output)

    def _send(self, request_id: int, mailbox: _Mailbox, output: RequestOutput) -> None:
        reply, failure = _made(mailbox, output)
        if failure is not output.failure:
            self._cancel(request_id)
            output = replace(output, failure=failure)
        if output.finished:
            del self._mailboxes[request_id]
            self._outcomes.ended(output)
        try:
            if reply is not None:
                mailbox.channel.send(reply, final=output.finished and failure is None)
            if failure is not None:
                mailbox.channel.fail(failure)
        except Exception:
            _LOG.warning("request %d: its response could not be sent", request_id, exc_info=True)
            self._cancel(request_id)
        if self._trace and output.finished and (context := mailbox.channel.trace_context):
            self._trace(context, mailbox.opened, output)

    def _poll(self) -> None:
        """Cancel what clients have left, at a rate that costs a bounded share of this thread."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        mailboxes = list(self._mailboxes.items())
        for request_id, mailbox in mailboxes:
            if mailbox.channel.cancelled():
                self._cancel(request_id)
        self._next_poll = now + max(_POLL_INTERVAL_S, len(mailboxes) * _POLL_COST_S / _POLL_SHARE)


def _made(mailbox: _Mailbox, output: RequestOutput) -> tuple[Reply | None, RequestFailure | None]:
    """A reply, or a failure; or both: a stream that broke off, not by its client's will, first gets what was held."""
    failure, builder = output.failure, mailbox.builder
    broke_off = mailbox.streams and output.text and failure is not None and failure.code is not ErrorCode.CANCELLED
    if builder is None or (failure is not None and not broke_off):
        return None, failure
    reason = None if failure is None else FinishReason.ERROR.value
    try:
        return builder.build(output, num_merged=mailbox.num_merged, reason=reason), failure
    except Exception as error:
        _LOG.exception("request %d: its response could not be made", output.request_id)
        kind = type(error).__name__
        return None, failure or RequestFailure(ErrorCode.INTERNAL, f"internal error ({kind}); see the server's log")
