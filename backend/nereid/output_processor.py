"""OutputProcessor: new tokens to text that can be shown. Owns each running request's detokenizer and stop checker.

Used by the loop thread alone. Invariant: after the output that ends a request nothing of it is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nereid.batch import PromptLogprobs
from nereid.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from nereid.tokenization.detokenizer import Detokenizer
from nereid.tokenization.stop_checker import StopChecker
from nereid.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class _TextState:
    sampling: SamplingParams
    num_prompt_tokens: int
    detokenizer: Detokenizer
    stop_checker: StopChecker
    num_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """All of them, once, as soon as the last one is known."""
        taken: tuple[TokenLogprobs, ...] = ()
        if self.prompt_logprobs and len(self.prompt_logprobs) == self.num_prompt_tokens - 1:
            taken = tuple(self.prompt_logprobs)
            self.prompt_logprobs = []
        return taken


class OutputProcessor:
    """Text states by request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[int, _TextState] = {}

    def add(self, request: Request) -> None:
        """Make ready for a request's tokens."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        detokenizer = Detokenizer(self._tokenizer, prompt, show_control_tokens=sampling.show_control_tokens)
        checker = StopChecker(sampling.stop, include_stop=sampling.include_stop)
        self._states[request.request_id] = _TextState(sampling, len(prompt), detokenizer, checker)

    def keep_prompt_logprobs(self, entries: Sequence[PromptLogprobs]) -> None:
        """Keep what a step told of prompts; what is known already (a preempted request computes it anew) is dropped."""
        for entry in entries:
            if (state := self._states.get(entry.request_id)) and state.num_tokens == 0:
                known = len(state.prompt_logprobs) + 1  # the first position has none
                state.prompt_logprobs += entry.logprobs[max(0, known - entry.start) :]

    def advance(
        self,
        request_id: int,
        token_id: int,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
        *,
        completes: bool = False,
    ) -> RequestOutput:
        """The output that a token brings; `reason` is why the token ends the request, where it does.

        A token that stops the request is counted but not shown, unless it `completes` what a guide describes: then it
        is part of the text. A stop string turns the output into one that ends.
        """
        state = self._states[request_id]
        state.num_tokens += 1
        hidden = reason is FinishReason.STOP and not completes
        text = "" if hidden else state.detokenizer.append(token_id)
        if reason is not None:
            text += state.detokenizer.flush()
        shown, stopped_by = self._checked(state, text)
        stop_reason: str | int | None = stopped_by
        if stopped_by is not None:
            reason = FinishReason.STOP
        elif reason is not None:
            shown += state.stop_checker.flush()
            if reason is FinishReason.STOP and token_id in state.sampling.stop_token_ids:
                stop_reason = token_id
        if reason is not None:
            self.drop(request_id)
        told = (logprobs,) if logprobs is not None else ()
        return RequestOutput(
            request_id, shown, (token_id,), told, state.take_prompt_logprobs(), reason, stop_reason=stop_reason
        )

    @staticmethod
    def _checked(state: _TextState, text: str) -> tuple[str, str | None]:
        if state.num_tokens <= state.sampling.min_tokens:
            return text, None  # no stop of any kind before min_tokens
        return state.stop_checker.append(text)

    def whole(self, request: Request, token_ids: Sequence[int], reason: FinishReason) -> RequestOutput:
        """The one output of a sequence that ended with all of these tokens; stop strings are not looked for."""
        sampling = request.sampling
        detokenizer = Detokenizer(
            self._tokenizer, request.prompt_token_ids, show_control_tokens=sampling.show_control_tokens
        )
        stopped = reason is FinishReason.STOP
        shown = token_ids[:-1] if stopped else token_ids
        text = "".join([*map(detokenizer.append, shown), detokenizer.flush()])
        stop_reason = token_ids[-1] if stopped and token_ids[-1] in sampling.stop_token_ids else None
        return RequestOutput(request.request_id, text, tuple(token_ids), finish_reason=reason, stop_reason=stop_reason)

    def take_prompt_logprobs(self, request_id: int) -> tuple[TokenLogprobs, ...]:
        """What `keep_prompt_logprobs` has kept of a request, where it is all and was not told yet."""
        return self._states[request_id].take_prompt_logprobs()

    def end(self, request_id: int, reason: FinishReason) -> RequestOutput:
        """End a request between two tokens: what was held back is shown."""
        state = self._states.pop(request_id)
        shown, _ = state.stop_checker.append(state.detokenizer.flush())
        return RequestOutput(request_id, shown + state.stop_checker.flush(), finish_reason=reason)

    def drop(self, request_id: int) -> None:
        """Forget a request that ends with an error."""
        self._states.pop(request_id, None)
