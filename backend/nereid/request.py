"""What a request is and what comes back: plain frozen data that both sides of the engine's queues know.

Everything here can be pickled, so that the engine's loop may live in another process than the server's face.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nereid.errors import ErrorCode


class FinishReason(Enum):
    """Why a request ended without an error, in the words that clients see."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"


class RequestStatus(Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends. Values are checked by the request parser.

    temperature: 0 is greedy.  top_k: 0 or less keeps all.  top_p: in [0, 1].  min_p: in [0, 1], a share of the
    largest probability.  seed: keys the noise, 64 bits.  max_tokens: at least 1; the scheduler cuts it to the room
    left.  min_tokens: so many tokens come before the one that stops.  stop: texts that end the output, not shown.
    stop_token_ids: ids that end the output like the model's own end-of-sequence ids, which ignore_eos disregards.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it. `request_id` is the engine's own: unique, ascending.

    arrival_time, deadline: seconds on the monotonic clock; deadline None never passes.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """An error as data: what the client is told, and under which code."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request gained since its last output; the last one of a request has `finished` true, and only that one.

    text: new text that can be shown.  num_new_tokens: tokens generated since the last output, shown or held back.
    At the end exactly one of finish_reason and failure is set.
    """

    request_id: int
    text: str = ""
    num_new_tokens: int = 0
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def merge(self, later: RequestOutput) -> RequestOutput:
        """This output and the one after it, as one."""
        return RequestOutput(
            self.request_id,
            self.text + later.text,
            self.num_new_tokens + later.num_new_tokens,
            later.finish_reason,
            later.failure,
        )


@dataclass(frozen=True, slots=True)
class Submit:
    """Message to the loop: take this request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Message to the loop: end this request; ignored where it has ended already."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Message to the loop: take no more requests; end what still runs at `deadline` (monotonic seconds)."""

    deadline: float


EngineMessage = Submit | Cancel | Drain
