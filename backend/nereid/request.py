"""What a request is and what comes back: plain frozen data that both sides of the engine's queues know.

Everything here can be pickled, so that the engine's loop may live in another process than the server's face.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from nereid.errors import ErrorCode


class FinishReason(Enum):
    """Why a request ended, in the words that clients and metrics see."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # this and the next: of requests that end with a failure
    ERROR = "error"


class RequestStatus(Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class GuideKind(Enum):
    """What a guide is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Guide:
    """What an output has to be. source: the schema's JSON, the regular expression, the grammar in Lark or EBNF, the
    choices as a JSON list of texts; empty for JSON_OBJECT."""

    kind: GuideKind
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends. Values are checked by the request parser.

    temperature: 0 is greedy.  top_k: 0 or less keeps all.  top_p: in [0, 1].  min_p: in [0, 1], a share of the
    largest probability.  seed: keys the noise, 64 bits.
    repetition_penalty: above 0, 1 is none; of prompt and output.  frequency_penalty, presence_penalty: of the output.
    logit_bias: (token id, what is added to its logit), each id once.  allowed_token_ids: all others are banned.
    bad_words: sequences of token ids that the output must not hold.  guide: what the output has to be.
    max_tokens: at least 1; the scheduler cuts it to the room left.  min_tokens: so many tokens come before the one that
    stops.  stop: texts that end the output, shown only with include_stop.  stop_token_ids: ids that end the output like
    the model's own end-of-sequence ids, which ignore_eos disregards.
    show_control_tokens: control tokens are part of the text.
    logprobs, prompt_logprobs: so many best tokens are told at each position, beside the one that stands there; 0 is
    that one alone, None tells nothing.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    show_control_tokens: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Branching:
    """How many sequences a request's answer has, and how they are found.

    n: sequences in the answer.  best_of: so many are drawn, of which the n with the largest cumulative logprob are
    told; at least n.  beam_width: above 1 the n best of a beam search of that width, at least n; nothing is drawn then.
    length_penalty: a finished beam's cumulative logprob is divided by its length to this power.  early_stopping: the
    search ends with beam_width finished beams; else when no other can become better.
    """

    n: int = 1
    best_of: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def streams(self) -> bool:
        """Whether tokens can be told before all sequences have ended."""
        return self.best_of == self.n and self.beam_width == 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it. `request_id` is the engine's own: unique, ascending.

    arrival_time, deadline: seconds on the monotonic clock; deadline None never passes.  priority: lower goes first
    among the requests of one cache_salt, by what it is worth in waiting (EngineConfig.priority_ageing_ms).
    cache_salt: whose request it is; tenants share the engine fairly, and no cached block.  cache, speculation: whether
    the request takes part in these.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    deadline: float | None = None
    priority: int = 0
    cache_salt: str = ""
    cache: bool = True
    speculation: bool = True
    branching: Branching = Branching()


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """An error as data: what the client is told, and under which code."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the token that stands there, and the best ones. Logarithms of probabilities before any penalty,
    mask, temperature or truncation.

    rank: 1 for the most probable.  top: (token id, logprob), best first, ties by the lowest id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What is known of a request at its end. Times in seconds on the monotonic clock; None: it did not get so far.

    num_output_tokens: all that were generated.  num_cached_tokens: of the prompt, found in the cache and not computed.
    num_draft_tokens, num_accepted_tokens: of speculation.  num_new_blocks: KV blocks that were allocated for it.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_new_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one sequence of a request gained since its last output.

    The last output of a sequence has `finished` true, and only that one; the last of a request has `final` true as
    well. A failure is the request's, and final. Where Branching.streams is false, each of the n sequences comes as one
    output, in the order of sequence_index.

    sequence_index: from 0 to n - 1.  cumulative_logprob: at a sequence's end, of its output, where it was asked for or
    chosen by.  text: new text that can be shown.  token_ids: generated since the last output, shown or held back.
    logprobs: one entry a token of token_ids, where they were asked for.  prompt_logprobs: of all positions of the
    prompt but the first, once they are known.  stop_reason: the text, or the id out of stop_token_ids, that ended it.
    At its end exactly one of finish_reason and failure is set; stats come with the final output, where the request
    reached the scheduler.
    """

    request_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    failure: RequestFailure | None = None
    stats: RequestStats | None = None
    sequence_index: int = 0
    cumulative_logprob: float | None = None
    final: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def merge(self, later: RequestOutput) -> RequestOutput:
        """This output and the one after it, as one."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
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
