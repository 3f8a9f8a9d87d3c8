"""Log-probabilities in OpenAI's two forms, from those of the pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nereid.gateway.pieces import TokenLogprob


def chat_logprobs(positions: Sequence[TokenLogprob], num_best: int) -> dict[str, object]:
    """`logprobs` of a chat's choice. num_best: how many of the likeliest tokens each position shows."""
    return {"content": [_chat_position(position, num_best) for position in positions], "refusal": None}


def _chat_position(position: TokenLogprob, num_best: int) -> dict[str, object]:
    best = [_chat_token(token, logprob) for token, logprob in position.best[:num_best]]
    return {**_chat_token(position.token, position.logprob), "top_logprobs": best}


def _chat_token(token: str, logprob: float | None) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8"))}


class CompletionLogprobs:
    """`logprobs` of a completion's choice, piece by piece. Owns the offset in the choice's text."""

    def __init__(self, num_best: int) -> None:
        self._num_best = num_best
        self._offset = 0

    def take(self, positions: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """The next positions. top_logprobs holds the token itself too, where it is not one of the likeliest."""
        offsets: list[object] = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(position.token)
        return {
            "tokens": [position.token for position in positions],
            "token_logprobs": [position.logprob for position in positions],
            "top_logprobs": [self._best(position) for position in positions],
            "text_offset": offsets,
        }

    def _best(self, position: TokenLogprob) -> dict[str, float] | None:
        if position.logprob is None:
            return None
        return {**dict(position.best[: self._num_best]), position.token: position.logprob}


def with_first_token(positions: Sequence[TokenLogprob], prompt: str) -> tuple[TokenLogprob, ...]:
    """The positions of a prompt, whose first is given the text that the others leave of `prompt`."""
    if not positions:
        return ()
    others = "".join(position.token for position in positions[1:])
    first = prompt.removesuffix(others) if prompt.endswith(others) else ""
    return (replace(positions[0], token=first), *positions[1:])
