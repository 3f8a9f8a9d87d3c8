"""OutputProcessor: new tokens to text that can be shown. Owns each running request's detokenizer and stop checker.

Used by the loop thread alone. Invariant: after the output that ends a request nothing of it is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereid.request import FinishReason, Request, RequestFailure, RequestOutput
from nereid.tokenization.detokenizer import Detokenizer
from nereid.tokenization.stop_checker import StopChecker
from nereid.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class _TextState:
    detokenizer: Detokenizer
    stop_checker: StopChecker
    min_tokens: int
    num_tokens: int = 0


class OutputProcessor:
    """Text states by request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[int, _TextState] = {}

    def add(self, request: Request) -> None:
        """Make ready for a request's tokens."""
        detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids)
        sampling = request.sampling
        self._states[request.request_id] = _TextState(detokenizer, StopChecker(sampling.stop), sampling.min_tokens)

    def advance(self, request_id: int, token_id: int, reason: FinishReason | None) -> RequestOutput:
        """The output that a token brings; `reason` is why the token ends the request, where it does.

        A token that stops the request is counted but not shown. A stop string turns the output into one that ends.
        """
        state = self._states[request_id]
        state.num_tokens += 1
        text = "" if reason is FinishReason.STOP else state.detokenizer.append(token_id)
        if reason is not None:
            text += state.detokenizer.flush()
        if state.num_tokens <= state.min_tokens:
            shown, stopped = text, False  # no stop of any kind before min_tokens
        else:
            shown, stopped = state.stop_checker.append(text)
        if stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            shown += state.stop_checker.flush()
        if reason is not None:
            self.drop(request_id)
        return RequestOutput(request_id, shown, 1, reason)

    def end(self, request_id: int, reason: FinishReason) -> RequestOutput:
        """End a request between two tokens: what was held back is shown."""
        state = self._states.pop(request_id)
        shown, _ = state.stop_checker.append(state.detokenizer.flush())
        return RequestOutput(request_id, shown + state.stop_checker.flush(), 0, reason)

    def fail(self, request_id: int, failure: RequestFailure) -> RequestOutput:
        """End a request with an error."""
        self.drop(request_id)
        return RequestOutput(request_id, failure=failure)

    def drop(self, request_id: int) -> None:
        self._states.pop(request_id, None)
