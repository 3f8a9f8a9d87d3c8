"""Replies: what a response says, as plain values by the names of the output tensors.

A response shows one sequence of a stream, or all n of an answer that does not stream: one element a sequence. A
ReplyBuilder owns what has to be known of a request's earlier responses: the sums of its logprobs, which texts have
begun, and whether its prompt's logprobs were told. It is used by the sender thread alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nereid.request import RequestOutput, RequestStats, TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
# Outputs that have no switch of their own, and whose they go by.
_SWITCHES = {"sequence_length": "output_ids", "cum_log_probs": "log_probs", "output_log_probs": "log_probs"}


@dataclass(frozen=True, slots=True)
class Rows:
    """A row of any length for each sequence. fill: what makes rows as long as the longest, where they have to be."""

    rows: tuple[Sequence[float], ...]
    fill: float


Outputs = Sequence[RequestOutput]
# Values by tensor.
Reply = Mapping[str, Sequence[object] | Rows]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How a request wants its answer.

    prefix: what each text begins with (the prompt, or nothing).  wanted: the outputs that were switched on, by what
    follows `return_` in the switch.  logprobs, prompt_logprobs: whether the engine was asked for them.
    num_sequences: in the answer.  pad_id: fills rows of token ids.
    """

    stream: bool = False
    prefix: str = ""
    num_input_tokens: int = 0
    wanted: frozenset[str] = frozenset()
    logprobs: bool = False
    prompt_logprobs: bool = False
    num_sequences: int = 1
    pad_id: int = 0

    def tells(self, name: str) -> bool:
        """Whether each response has the output `name`."""
        if name == "sequence_index" and self.stream and self.num_sequences > 1:
            return True  # it has to say which one it shows
        return _SWITCHES.get(name, name) in self.wanted


class ReplyBuilder:
    """Makes the responses of one request."""

    def __init__(self, options: ReplyOptions, spell: Callable[[int], str], block_size: int) -> None:
        """spell: the text of one token.  block_size: tokens a KV block."""
        self.options = options
        self._spell = spell
        self._block_size = block_size
        self._prefixes = dict.fromkeys(range(options.num_sequences), options.prefix)
        self._cumulative = dict.fromkeys(range(options.num_sequences), 0.0)
        self._prompt_told = False
        self._told = [(name, make) for name, make in _MAKERS.items() if options.tells(name)]

    def build(self, outputs: Outputs, *, num_merged: int = 0, reason: str | None = None) -> Reply:
        """The response that shows `outputs`, each of another sequence, in their order.

        num_merged: deltas of the request that went out with a later one, so far.  reason: said as the finish_reason in
        place of the outputs' own.
        """
        for output in outputs:
            self._cumulative[output.sequence_index] += sum([entry.logprob for entry in output.logprobs])
        texts = [self._prefixes.pop(output.sequence_index, "") + output.text for output in outputs]
        reply: dict[str, Sequence[object] | Rows] = {"text_output": texts}
        for name, make in self._told:
            reply[name] = make(self, outputs)
        if reason is not None and "finish_reason" in reply:
            reply["finish_reason"] = [reason] * len(outputs)
        if "prompt_logprobs" in self.options.wanted:
            reply |= self._prompt_logprobs(outputs)
        for stats in [output.stats for output in outputs if output.stats is not None]:
            reply |= self._at_the_end(stats, num_merged)
        return reply

    def sums(self, outputs: Outputs) -> list[float]:
        """Of all logprobs so far; the engine's own sum where it gives one."""
        ours = [self._cumulative[output.sequence_index] for output in outputs]
        known = [output.cumulative_logprob for output in outputs]
        return [our if sum_ is None else sum_ for our, sum_ in zip(ours, known, strict=True)]

    def logprobs(self, output: RequestOutput) -> str:
        """As JSON."""
        told = [self._entry(entry) for entry in output.logprobs] if self.options.logprobs else None
        return json.dumps(told)

    def _prompt_logprobs(self, outputs: Outputs) -> dict[str, Sequence[object]]:
        """Once: as soon as they are known, which for a prompt of one token is at once."""
        if not self.options.prompt_logprobs:
            return {"prompt_logprobs": ["null"]}
        known = [entry for output in outputs for entry in output.prompt_logprobs]
        if self._prompt_told or not (known or self.options.num_input_tokens == 1):
            return {}
        self._prompt_told = True
        return {"prompt_logprobs": [json.dumps([None, *(self._entry(entry) for entry in known)])]}

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


def _reason(output: RequestOutput) -> str:
    return output.finish_reason.value if output.finish_reason else "None"  # "None" as in the vLLM backend


def _lengths(builder: ReplyBuilder, outputs: Outputs) -> list[int]:
    return [len(output.token_ids) for output in outputs]


def _token_logprobs(builder: ReplyBuilder, outputs: Outputs) -> Rows:
    return Rows(tuple([[entry.logprob for entry in output.logprobs] for output in outputs]), 0.0)


# What each response may say, but for what is said once, and how it is made.
_MAKERS: Mapping[str, Callable[[ReplyBuilder, Outputs], Sequence[object] | Rows]] = {
    "finish_reason": lambda builder, outputs: [_reason(output) for output in outputs],
    "stop_reason": lambda builder, outputs: [json.dumps(output.stop_reason, ensure_ascii=False) for output in outputs],
    "cumulative_logprob": ReplyBuilder.sums,
    "logprobs": lambda builder, outputs: [builder.logprobs(output) for output in outputs],
    "num_input_tokens": lambda builder, outputs: [builder.options.num_input_tokens],
    "num_output_tokens": _lengths,
    "sequence_index": lambda builder, outputs: [output.sequence_index for output in outputs],
    "output_ids": lambda builder, outputs: Rows(tuple([o.token_ids for o in outputs]), builder.options.pad_id),
    "sequence_length": _lengths,
    "cum_log_probs": ReplyBuilder.sums,
    "output_log_probs": _token_logprobs,
}
