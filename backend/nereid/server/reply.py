"""Replies: what a response says, as plain values by the names of the output tensors.

A ReplyBuilder owns what has to be known of a request's earlier responses: the sum of its logprobs, and whether its
prompt has been echoed. It is used by the sender thread alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nereid.request import RequestOutput, RequestStats, TokenLogprobs

# Values by tensor: each a sequence, or as many of them as the tensor has dimensions.
Reply = Mapping[str, Sequence[object]]

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_LOG_PROBS = "log_probs"


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How a request wants its answer.

    prefix: what the text begins with (the prompt, or nothing).  wanted: the outputs that were switched on, by what
    follows `return_` in the switch.  logprobs, prompt_logprobs: whether the engine was asked for them.
    """

    stream: bool = False
    prefix: str = ""
    num_input_tokens: int = 0
    wanted: frozenset[str] = frozenset()
    logprobs: bool = False
    prompt_logprobs: bool = False


class ReplyBuilder:
    """Makes the responses of one request."""

    def __init__(self, options: ReplyOptions, spell: Callable[[int], str], block_size: int) -> None:
        """spell: the text of one token.  block_size: tokens a KV block."""
        self.options = options
        self._spell = spell
        self._block_size = block_size
        self._prefix = options.prefix
        self._cumulative = 0.0
        self._prompt_told = False

    def build(self, output: RequestOutput, *, num_merged: int = 0, reason: str | None = None) -> Reply:
        """The response that shows `output`. num_merged: deltas of the request that went out with a later one, so far.
        reason: said as the finish_reason in place of the output's own."""
        self._cumulative += sum(entry.logprob for entry in output.logprobs)
        reply: dict[str, Sequence[object]] = {"text_output": [self._prefix + output.text]}
        self._prefix = ""
        for name, values in self._values(output, reason).items():
            if name in self.options.wanted:
                reply[name] = values
        if _LOG_PROBS in self.options.wanted:
            reply["cum_log_probs"] = [self._cumulative]
            reply["output_log_probs"] = [entry.logprob for entry in output.logprobs]
        if "output_ids" in self.options.wanted:
            reply["sequence_length"] = [len(output.token_ids)]
        if "logprobs" in self.options.wanted:
            told = [self._entry(entry) for entry in output.logprobs] if self.options.logprobs else None
            reply["logprobs"] = [json.dumps(told)]
        if "prompt_logprobs" in self.options.wanted:
            reply |= self._prompt_logprobs(output)
        if output.stats is not None:
            reply |= self._at_the_end(output.stats, num_merged)
        return reply

    def _values(self, output: RequestOutput, reason: str | None) -> dict[str, Sequence[object]]:
        """What each response may say, but for what is said once."""
        ended = output.finish_reason.value if output.finish_reason else "None"  # "None" as in the vLLM backend
        return {
            "output_ids": output.token_ids,
            "finish_reason": [reason or ended],
            "stop_reason": [json.dumps(output.stop_reason, ensure_ascii=False)],
            "cumulative_logprob": [self._cumulative],
            "num_input_tokens": [self.options.num_input_tokens],
            "num_output_tokens": [len(output.token_ids)],
            "sequence_index": [0],
        }

    def _prompt_logprobs(self, output: RequestOutput) -> dict[str, Sequence[object]]:
        """Once: as soon as they are known, which for a prompt of one token is at once."""
        if not self.options.prompt_logprobs:
            return {"prompt_logprobs": ["null"]}
        if self._prompt_told or not (output.prompt_logprobs or self.options.num_input_tokens == 1):
            return {}
        self._prompt_told = True
        entries = [None, *(self._entry(entry) for entry in output.prompt_logprobs)]
        return {"prompt_logprobs": [json.dumps(entries)]}

    def _entry(self, position: TokenLogprobs) -> dict[str, object]:
        """The token that stands there first, then the best ones in their order."""
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)]
        found = {token_id: (logprob, rank) for token_id, logprob, rank in ranked}
        ordered = {position.token_id: (position.logprob, position.rank)} | found
        ordered[position.token_id] = (position.logprob, position.rank)
        return {
            str(token_id): {
                "logprob": max(logprob, _LOWEST_LOGPROB), "rank": rank, "decoded_token": self._spell(token_id),
            }
            for token_id, (logprob, rank) in ordered.items()
        }  # fmt: skip

    def _at_the_end(self, stats: RequestStats, num_merged: int) -> dict[str, Sequence[object]]:
        """What is known once a request has ended; a time that never came is left out."""
        reply: dict[str, Sequence[object]] = {}
        if "num_cached_tokens" in self.options.wanted:
            reply["num_cached_tokens"] = [stats.num_cached_tokens]
        if "perf_metrics" not in self.options.wanted:
            return reply
        times = {
            "arrival_time_ns": stats.arrival_time,
            "first_scheduled_time_ns": stats.first_scheduled_time,
            "first_token_time_ns": stats.first_token_time,
            "last_token_time_ns": stats.last_token_time,
        }
        reused = stats.num_cached_tokens // self._block_size
        counts = {
            "num_preemptions": stats.num_preemptions,
            "num_merged_responses": num_merged,
            "total_draft_tokens": stats.num_draft_tokens,
            "total_accepted_draft_tokens": stats.num_accepted_tokens,
            "acceptance_rate": stats.num_accepted_tokens / (stats.num_draft_tokens or 1),
            "kv_cache_reused_blocks": reused,
            "kv_cache_alloc_new_blocks": stats.num_new_blocks,
            "kv_cache_alloc_total_blocks": reused + stats.num_new_blocks,
        }
        known = {name: [round(time * 1e9)] for name, time in times.items() if time is not None}
        return {**reply, **known, **{name: [count] for name, count in counts.items()}}
