"""Fields of a request -> Branching: how many sequences its answer has, and how they are found. Pure functions.

A beam search goes by the model's own log-probabilities and draws nothing. So the fields that say how a token is drawn
(temperature, top_k, top_p, min_p, seed) are without effect on it, as clients send them whatever they ask for; those
that change what the model says (penalties, biases, bans, guides) are refused. So are stop texts, since a beam has no
text until it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereid.errors import InvalidRequestError
from nereid.request import Branching

MAX_SEQUENCES = 128
# What leaves the model's log-probabilities as they are, by the fields that could change them; and no stop texts.
_NEUTRAL: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": (),
    "allowed_token_ids": None,
    "bad_words": (),
    "embedding_bias_words": (),
    "stop": (),
}


def branching_of(fields: Mapping[str, Any], *, max_sequences: int, guide: str | None, stream: bool) -> Branching:
    """max_sequences: of one request, at once.  guide: the name of the field with one.  stream: tokens are to be told as
    they come. Raises InvalidRequestError.
    """
    width = _beam_width(fields)
    n = fields.get("n", width)
    best_of = n if width > 1 else fields.get("best_of", n)
    _check_counts(fields, n, best_of, width, max_sequences)
    branching = Branching(n, best_of)
    if width > 1:
        _check_beams(fields, guide)
        penalty, early = fields.get("length_penalty", 1.0), fields.get("early_stopping", False)
        branching = Branching(n, best_of, width, penalty, early)
    if stream and not branching.streams:
        allowed = "false with best_of above n, and with a beam search: only at their end is known what is told"
        raise InvalidRequestError.of_field("stream", True, allowed)
    return branching


def _beam_width(fields: Mapping[str, Any]) -> int:
    """1 where there is no beam search."""
    asked: bool | None = fields.get("use_beam_search")
    width: int = fields.get("beam_width", 1)
    if asked and "beam_width" not in fields:
        width = fields.get("best_of", fields.get("n", 1))
    if asked is not None and asked is not (width > 1):
        allowed = "with beam_width, best_of or n above 1" if asked else f"true, or absent, with beam_width {width}"
        raise InvalidRequestError.of_field("use_beam_search", asked, allowed)
    return width


def _check_counts(fields: Mapping[str, Any], n: int, best_of: int, width: int, max_sequences: int) -> None:
    for name in ("n", "best_of", "beam_width"):
        if fields.get(name, 1) > max_sequences:
            allowed = f"1 to {max_sequences} (at most {MAX_SEQUENCES} and max_num_seqs)"
            raise InvalidRequestError.of_field(name, fields[name], allowed)
    if width > 1 and n > width:
        raise InvalidRequestError.of_field("n", n, f"at most beam_width ({width})")
    if width > 1 and fields.get("best_of", 1) not in (1, width):
        allowed = f"no value with a beam search, or its beam_width ({width})"
        raise InvalidRequestError.of_field("best_of", fields["best_of"], allowed)
    if best_of < n:
        raise InvalidRequestError.of_field("best_of", best_of, f"at least n ({n})")


def _check_beams(fields: Mapping[str, Any], guide: str | None) -> None:
    why = "with a beam search, which goes by the log-probabilities of the model's own tokens"
    for name, neutral in _NEUTRAL.items():
        if fields.get(name, neutral) != neutral:
            said = "no value" if neutral in ((), None) else f"{neutral}"
            raise InvalidRequestError.of_field(name, fields[name], f"{said} {why}")
    if guide is not None:
        raise InvalidRequestError(f"{guide}: got a guide; allowed: none {why}")
