"""ResponseStream: outputs of the engine -> responses of the server. Owns a mailbox for each request and the one thread
that sends.

The engine's thread only puts outputs into a queue. Where the sender falls behind, what has piled up for a sequence is
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

from nereid.errors import ErrorCode
from nereid.request import RequestFailure, RequestOutput
from nereid.server.mailbox import Ending, Letter, Mailbox, ReplyChannel
from nereid.server.outcomes import Outcomes
from nereid.server.reply import Reply, ReplyBuilder

_LOG = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.05
_POLL_COST_S = 100e-6  # of one `cancelled`, measured
_POLL_SHARE = 0.02  # of this thread's time at most; the server spends as much on it, on the cores that compute

# The server's trace context, and how the request ended.
Trace = Callable[[str, Ending], None]


class ResponseStream:
    """One a model. `emit` is the engine's; `register` comes before the request's submission."""

    def __init__(self, cancel: Callable[[int], None], outcomes: Outcomes, trace: Trace | None = None) -> None:
        """cancel: ends a request, by id, in the engine.  outcomes: counts what is sent.  trace: hears of their ends."""
        self._cancel = cancel
        self._outcomes = outcomes
        self._trace = trace
        self._queue: queue.SimpleQueue[tuple[RequestOutput, ...] | None] = queue.SimpleQueue()
        self._mailboxes: dict[int, Mailbox] = {}
        self._refused_ids = itertools.count(-1, -1)  # the engine's are positive
        self._next_poll = 0.0
        self._thread = threading.Thread(target=self._loop, name="nereid-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, request_id: int, channel: ReplyChannel, builder: ReplyBuilder | None) -> None:
        """Make a mailbox; its channel is let go with the final response."""
        self._mailboxes[request_id] = Mailbox(channel, builder)

    def refuse(self, channel: ReplyChannel, failure: RequestFailure) -> None:
        """End a request that never reached the engine; by the sender, as all others, and not from within `execute`."""
        request_id = next(self._refused_ids)
        self.register(request_id, channel, None)
        self.emit((RequestOutput(request_id, failure=failure, final=True),))

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
            for letter in mailbox.take():
                if request_id in self._mailboxes:  # it goes where a letter cannot be made
                    self._send(request_id, mailbox, letter)

    def _send(self, request_id: int, mailbox: Mailbox, letter: Letter) -> None:
        reply, failure = _made(request_id, mailbox, letter)
        if failure is not letter.failure:
            self._cancel(request_id)
            letter = Letter(failure=failure, final=True)
        if letter.final:
            del self._mailboxes[request_id]
        self._outcomes.sent(letter)
        try:
            if reply is not None:
                mailbox.channel.send(reply, final=letter.final)
            elif failure is not None:
                mailbox.channel.fail(failure)
        except Exception:
            _LOG.warning("request %d: its response could not be sent", request_id, exc_info=True)
            self._cancel(request_id)
        if letter.final and self._trace and (context := mailbox.channel.trace_context):
            self._trace(context, mailbox.ending(failure))

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


def _made(request_id: int, mailbox: Mailbox, letter: Letter) -> tuple[Reply | None, RequestFailure | None]:
    """A reply, or a failure: the letter's own, or that the reply cannot be made."""
    if mailbox.builder is None or letter.failure is not None:
        return None, letter.failure
    try:
        return mailbox.builder.build(letter.outputs, num_merged=mailbox.num_merged, reason=letter.reason), None
    except Exception as error:
        _LOG.exception("request %d: its response could not be made", request_id)
        kind = type(error).__name__
        return None, RequestFailure(ErrorCode.INTERNAL, f"internal error ({kind}); see the server's log")
