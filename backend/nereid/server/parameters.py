"""Fields of a request -> SamplingParams, or an error that names the field. Pure functions.

What each field may be by itself its reader has checked; here is what depends on the model, on the deployment's limits
and on other fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError
from nereid.request import Guide, SamplingParams
from nereid.server.branching import MAX_SEQUENCES


@dataclass(frozen=True, slots=True)
class Limits:
    """What the values are checked against, and the defaults of a deployment."""

    vocab_size: int
    default_max_tokens: int
    default_timeout_ms: int
    max_logprobs: int = 20
    max_sequences: int = MAX_SEQUENCES

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int) -> Limits:
        return cls(
            vocab_size,
            config.default_max_tokens,
            config.default_timeout_ms,
            config.max_logprobs,
            min(MAX_SEQUENCES, config.max_num_seqs),
        )


# Fields that are taken as they are, under the names that SamplingParams has for them.
_TAKEN = {
    name: name
    for name in (
        "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
        "frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids", "stop", "stop_token_ids",
        "ignore_eos", "logprobs", "prompt_logprobs",
    )
} | {"include_stop_str_in_output": "include_stop"}  # fmt: skip


def sampling_of(fields: Mapping[str, Any], limits: Limits, guide: Guide | None) -> SamplingParams:
    """How the tokens of a request are drawn; bad_words are left out, since they have to be encoded.

    Raises InvalidRequestError.
    """
    values = {ours: fields[name] for name, ours in _TAKEN.items() if name in fields}
    values.setdefault("max_tokens", limits.default_max_tokens)
    values.setdefault("seed", secrets.randbits(63))
    values["show_control_tokens"] = not fields.get("skip_special_tokens", True)
    values["guide"] = guide
    if "end_id" in fields:
        ends = () if fields["end_id"] == -1 else (fields["end_id"],)  # the client's own, in place of the model's
        check_ids("end_id", ends, limits)
        values["ignore_eos"] = True
        values["stop_token_ids"] = tuple(dict.fromkeys((*values.get("stop_token_ids", ()), *ends)))
    if fields.get("return_cumulative_logprob") or fields.get("return_log_probs"):
        values.setdefault("logprobs", 0)  # of the chosen token, which these are made of
    sampling = SamplingParams(**values)
    _check(sampling, limits)
    return sampling


def _check(params: SamplingParams, limits: Limits) -> None:
    if params.min_tokens > params.max_tokens:
        allowed = f"at most max_tokens ({params.max_tokens})"
        raise InvalidRequestError.of_field("min_tokens", params.min_tokens, allowed)
    if params.allowed_token_ids == ():
        raise InvalidRequestError.of_field("allowed_token_ids", [], "at least one token id")
    check_ids("stop_token_ids", params.stop_token_ids, limits)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    check_ids("logit_bias", (token_id for token_id, _ in params.logit_bias), limits)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > limits.max_logprobs:
            raise InvalidRequestError.of_field(name, count, f"0 to {limits.max_logprobs} (max_logprobs)")


def check_ids(name: str, token_ids: Iterable[int], limits: Limits) -> None:
    """Raises InvalidRequestError where an id is none of the model's vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError.of_field(name, token_id, f"token ids from 0 to {limits.vocab_size - 1}")
