"""Piece: one response of a model, as plain data. Owns the reading of the model's output tensors.

A streamed answer is many pieces, each with what is new; any other is one piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOWEST = -9999.0
# After the last two comes the error itself, which ends the answer.
_NOT_ENDED = ("", "None", "error", "cancelled")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position. logprob: None for the first token of a prompt, which follows nothing (its text is not known
    either).  best: the likeliest tokens there with theirs, best first."""

    token: str
    logprob: float | None
    best: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """finish_reason: None where more follows.  Numbers that the model does not report are None."""

    text: str
    finish_reason: str | None
    num_output_tokens: int
    num_input_tokens: int | None
    num_cached_tokens: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def read_piece(result: Any, prompt_ids: Sequence[int] | None = None) -> Piece:
    """result: tritonclient's InferResult.  prompt_ids: the prompt's tokens where they are known."""
    reason = _text(result, "finish_reason")
    count = _number(result, "num_output_tokens")
    output_ids = result.as_numpy("output_ids")
    return Piece(
        text=_text(result, "text_output"),
        finish_reason=None if reason in _NOT_ENDED else reason,
        num_output_tokens=count or 0,
        num_input_tokens=_number(result, "num_input_tokens"),
        num_cached_tokens=_number(result, "num_cached_tokens"),
        logprobs=_logprobs(_text(result, "logprobs"), None if output_ids is None else output_ids.tolist()),
        prompt_logprobs=_logprobs(_text(result, "prompt_logprobs"), prompt_ids),
    )


def _text(result: Any, name: str) -> str:
    array = result.as_numpy(name)
    return "" if array is None or array.size == 0 else str(array.reshape(-1)[0].decode("utf-8", "replace"))


def _number(result: Any, name: str) -> int | None:
    array = result.as_numpy(name)
    return None if array is None or array.size == 0 else int(array.reshape(-1)[0])


def _logprobs(text: str, ids: Sequence[int] | None) -> tuple[TokenLogprob, ...]:
    """text: a JSON list, an entry a token, each {token id: {logprob, rank, decoded_token}}; or null, or nothing.

    The token at a position is the one that `ids` names there, else the first of its entry.
    """
    entries: list[Mapping[str, Any] | None] = json.loads(text) or [] if text else []
    chosen = ids if ids is not None and len(ids) == len(entries) else [None] * len(entries)
    return tuple(_position(entry, token_id) for entry, token_id in zip(entries, chosen, strict=True))


def _position(entry: Mapping[str, Any] | None, token_id: int | None) -> TokenLogprob:
    if not entry:
        return TokenLogprob("", None, ())
    own = entry.get(str(token_id)) or next(iter(entry.values()))
    ranked = sorted(entry.values(), key=lambda candidate: float(candidate["logprob"]), reverse=True)
    best = tuple((str(c["decoded_token"]), max(float(c["logprob"]), _LOWEST)) for c in ranked)
    return TokenLogprob(str(own["decoded_token"]), max(float(own["logprob"]), _LOWEST), best)
