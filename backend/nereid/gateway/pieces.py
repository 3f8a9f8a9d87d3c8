"""Piece: what one response of a model says of one sequence, as plain data. Owns the reading of its output tensors.

A streamed answer is many pieces, each with what is new of its sequence; any other has one piece a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

Value = TypeVar("Value")

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
    """sequence_index: from 0.  finish_reason: None where more of the sequence follows.  prompt_logprobs: of the prompt,
    whichever sequence's piece has them.  Numbers that the model does not report are None."""

    sequence_index: int
    text: str
    finish_reason: str | None
    num_output_tokens: int
    num_input_tokens: int | None
    num_cached_tokens: int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def read_pieces(result: Any, prompt_ids: Sequence[int] | None = None) -> list[Piece]:
    """One for each sequence of a response, at least one. result: tritonclient's InferResult.  prompt_ids: the prompt's
    tokens where they are known."""
    texts = _texts(result, "text_output")
    count = max(1, len(texts))
    reasons, logprobs = _texts(result, "finish_reason"), _texts(result, "logprobs")
    num_tokens, indices = _numbers(result, "num_output_tokens"), _numbers(result, "sequence_index")
    ids = _by_sequence(_numbers(result, "output_ids"), num_tokens, count)
    prompt_logprobs = _logprobs(_at(_texts(result, "prompt_logprobs"), 0) or "", prompt_ids)
    num_input, num_cached = (_at(_numbers(result, f"num_{kind}_tokens"), 0) for kind in ("input", "cached"))
    return [
        Piece(
            sequence_index=indices[number] if number < len(indices) else number,
            text=_at(texts, number) or "",
            finish_reason=None if (reason := _at(reasons, number) or "") in _NOT_ENDED else reason,
            num_output_tokens=_at(num_tokens, number) or 0,
            num_input_tokens=num_input,
            num_cached_tokens=num_cached,
            logprobs=_logprobs(_at(logprobs, number) or "", ids[number]),
            prompt_logprobs=prompt_logprobs,
        )
        for number in range(count)
    ]


def _texts(result: Any, name: str) -> list[str]:
    array = result.as_numpy(name)
    return [] if array is None else [element.decode("utf-8", "replace") for element in array.reshape(-1)]


def _numbers(result: Any, name: str) -> list[int]:
    array = result.as_numpy(name)
    return [] if array is None else [int(element) for element in array.reshape(-1)]


def _at(values: Sequence[Value], number: int) -> Value | None:
    return values[number] if number < len(values) else None


def _by_sequence(ids: Sequence[int], num_tokens: Sequence[int], count: int) -> list[Sequence[int] | None]:
    """The ids of each sequence, which come one after the other; of one, they are its own whatever was counted."""
    if count == 1:
        return [ids or None]
    ends = list(accumulate(num_tokens))
    if len(ends) != count or ends[-1] != len(ids):
        return [None] * count
    return [ids[end - length : end] for length, end in zip(num_tokens, ends, strict=True)]


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
