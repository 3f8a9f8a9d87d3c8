"""The tensors of a deployment, made from the table of fields. Plain data; a user's config.pbtxt need not repeat them.

A deployment whose `max_batch_size` is 1 or more has besides the names and numbers that TensorRT-LLM's clients send as
tensors. `max_batch_size` says nothing of batching: a request is one prompt, under a leading dimension of 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereid.server.fields import FIELDS


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, Triton data type and dims of a tensor; meaning is what README prints.

    only_batched: a tensor of deployments with a leading dimension alone.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    meaning: str
    only_batched: bool = False

    def as_config(self, *, optional: bool) -> dict[str, object]:
        """The entry that Triton's model configuration takes."""
        entry: dict[str, object] = {"name": self.name, "data_type": self.data_type, "dims": list(self.dims)}
        return {**entry, "optional": True} if optional else entry


_PARAMETERS = TensorSpec("sampling_parameters", "TYPE_STRING", (1,), "a JSON object of fields")
INPUTS = (
    _PARAMETERS,
    *(TensorSpec(f.name, f.data_type, f.dims, f.meaning, not f.always_declared) for f in FIELDS),
    # Other names are tensors for those alone who are known to send them so; stop_words also by /generate.
    *(
        TensorSpec(alias, f.data_type, f.dims, f"as {f.name}", alias != "stop_words")
        for f in FIELDS
        for alias in f.aliases
    ),
)

_STRING, _UINT32, _INT32, _INT64, _FP32 = "TYPE_STRING", "TYPE_UINT32", "TYPE_INT32", "TYPE_INT64", "TYPE_FP32"
_ONE, _MANY = (1,), (-1,)


def _count(name: str, meaning: str, *, only_batched: bool = False) -> TensorSpec:
    return TensorSpec(name, _UINT32, _ONE, meaning, only_batched)


OUTPUTS = (
    TensorSpec("text_output", _STRING, _MANY, "the texts, one a sequence; in a stream, a delta of one"),
    TensorSpec(
        "output_ids", _INT32, _MANY,
        "the generated token ids; in a stream, a delta; of several sequences, one after the other",
    ),
    TensorSpec(
        "finish_reason", _STRING, _MANY,
        "`stop`, `length` or `timeout`; `None` in a stream before a sequence's last response",
    ),
    TensorSpec(
        "stop_reason", _STRING, _MANY, "JSON: the text of `stop` or the id of `stop_token_ids` that ended it, or null"
    ),
    TensorSpec("cumulative_logprob", _FP32, _MANY, "the sum of the logprobs of all tokens so far"),
    TensorSpec(
        "logprobs", _STRING, _MANY,
        'JSON: for each token `{"token id": {"logprob", "rank", "decoded_token"}}`, the chosen one first; in a stream, '
        "a delta; `null` where `logprobs` was not asked for",
    ),
    TensorSpec("prompt_logprobs", _STRING, _MANY, "JSON, likewise for the prompt, once; the first entry is null"),
    _count("num_input_tokens", "tokens of the prompt"),
    TensorSpec(
        "num_output_tokens", _UINT32, _MANY, "tokens generated, the one that stopped included; in a stream, a delta"
    ),
    _count("num_cached_tokens", "tokens of the prompt that were found in the cache; with the last response"),
    TensorSpec(
        "sequence_index", _INT32, _MANY,
        "which of the `n` sequences it is, from 0; in a stream of several, with each response unasked",
    ),
    *(
        TensorSpec(name, _INT64, _ONE, "nanoseconds on the server's monotonic clock")
        for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    ),
    _count("num_preemptions", "how often the request gave its KV blocks up"),
    _count("num_merged_responses", "deltas that went out with a later one, since the client or the sender was behind"),
    _count("total_draft_tokens", "of speculation: drafted"),
    _count("total_accepted_draft_tokens", "of these, accepted"),
    TensorSpec("acceptance_rate", _FP32, _ONE, "accepted / drafted; 0 where nothing was drafted"),
    _count("kv_cache_reused_blocks", "KV blocks found in the cache"),
    _count("kv_cache_alloc_new_blocks", "KV blocks allocated"),
    _count("kv_cache_alloc_total_blocks", "both together", only_batched=True),
    TensorSpec("cum_log_probs", _FP32, _MANY, "as `cumulative_logprob`, by `return_log_probs`", True),
    TensorSpec(
        "output_log_probs", _FP32, (-1, -1), "the logprob of each token, by `return_log_probs`; a row a sequence", True
    ),
    TensorSpec("sequence_length", _INT32, _MANY, "the number of `output_ids` of each sequence", True),
)  # fmt: skip


def declared(specs: tuple[TensorSpec, ...], *, batched: bool) -> tuple[TensorSpec, ...]:
    """The tensors that a deployment has if its config.pbtxt does not say else."""
    return tuple(spec for spec in specs if batched or not spec.only_batched)
