"""ModelInput: a step as tensors; and the batch state that turns a plan into one.

BatchState owns, for each request that the executor knows, its tokens and its block tables. Invariant: it follows the
plans exactly; a request's tokens are its prompt and all tokens drawn for it, or given in their stead.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nereid.batch import NewRequest, ScheduledRequest, SchedulerOutput
from nereid.kv_memory.storage import KVCacheStorage
from nereid.request import SamplingParams
from nereid_kernels.kv_write import KVWritePlan, plan_kv_write
from nereid_kernels.paged_attention import AttentionPlan, plan_paged_attention


@dataclass(frozen=True, slots=True)
class GroupInput:
    """Where a step's tokens are written and what they look back at, for the layers of one KV cache group."""

    kv_write: KVWritePlan
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class ModelInput:
    """token_ids, positions: [tokens] int64.  hidden_rows: [rows] int64, tokens whose hidden states are wanted: the last
    of each row that samples, in their order, then those of prompts whose logprobs are told.  groups: by KV cache
    group."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    hidden_rows: torch.Tensor
    groups: tuple[GroupInput, ...]


@dataclass(slots=True)
class RequestTokens:
    """One request behind the executor seam. block_tables: by KV cache group, ints of 32 bits, as they are handed on."""

    sampling: SamplingParams
    prompt_len: int
    token_ids: list[int]
    block_tables: tuple[array[int], ...]

    def told_positions(self, row: ScheduledRequest) -> range:
        """Positions of the prompt whose logprobs a step tells: the hidden states before them are computed by it.

        None of a request that has output already: it was preempted, and all have been told.
        """
        if self.sampling.prompt_logprobs is None or len(self.token_ids) > self.prompt_len:
            return range(0)
        first = row.num_computed_tokens + 1
        return range(first, min(first + row.num_scheduled_tokens, self.prompt_len))


class BatchState:
    """Requests by id, as far as the plans have told."""

    def __init__(self, num_groups: int, backend: str) -> None:
        """num_groups: KV cache groups.  backend: of `nereid_kernels.backends`, for which steps are planned."""
        self._num_groups = num_groups
        self._backend = backend
        self._requests: dict[int, RequestTokens] = {}

    def __getitem__(self, request_id: int) -> RequestTokens:
        return self._requests[request_id]

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's news: forgotten requests, new ones, changed block tables, given tokens."""
        for request_id in plan.finished_ids:
            del self._requests[request_id]
        for new in plan.new_requests:
            self._add(new)
        for row in plan.scheduled:
            request = self._requests[row.request_id]
            if row.new_block_ids:
                news = zip(request.block_tables, row.first_new_blocks, row.new_block_ids, strict=True)
                for table, first, added in news:
                    table[first:] = array("i", added)
            if row.given_token_ids:
                request.token_ids[row.first_given :] = row.given_token_ids

    def _add(self, new: NewRequest) -> None:
        prompt = list(new.prompt_token_ids)
        tables = tuple(array("i") for _ in range(self._num_groups))
        self._requests[new.request_id] = RequestTokens(new.sampling, len(prompt), prompt, tables)

    def build(self, rows: Sequence[ScheduledRequest], cache: KVCacheStorage) -> ModelInput:
        """The tensors of a step with at least one row that has tokens.

        NOTE: between two steps the processor's caches are full of weights, and what is called for the first time costs
        more than what it does: so lists are filled, and few kinds of call make tensors of them.
        """
        requests = [self._requests[row.request_id] for row in rows]
        spans = [range(r.num_computed_tokens, r.num_computed_tokens + r.num_scheduled_tokens) for r in rows]
        token_ids: list[int] = []
        positions: list[int] = []
        ends = []  # of each row's tokens in the step
        for request, span in zip(requests, spans, strict=True):
            token_ids += request.token_ids[span.start : span.stop]
            positions += span
            ends.append(len(positions))
        return ModelInput(
            _tensor(token_ids),
            _tensor(positions),
            _tensor(_hidden_rows(rows, requests, ends)),
            tuple(self._group_input(group, requests, spans, cache) for group in range(self._num_groups)),
        )

    def _group_input(
        self, group: int, requests: Sequence[RequestTokens], spans: Sequence[range], cache: KVCacheStorage
    ) -> GroupInput:
        layer = cache.first_of_group(group)
        block_size = layer.k.shape[2]
        tables = [request.block_tables[group] for request in requests]
        seq_lens = [span.stop for span in spans]
        used = [-(-seq_len // block_size) for seq_len in seq_lens]
        padded = np.zeros((len(used), max(used)), dtype=np.int32)
        slots: list[int] = []
        for row, table, span, count in zip(padded, tables, spans, used, strict=True):
            if count > len(table):
                raise IndexError(f"{count} blocks are wanted of a table of {len(table)}")
            row[:count] = table[:count]
            slots += _slots(table, span, block_size)
        return GroupInput(
            plan_kv_write(_tensor(slots), layer.k, backend=self._backend),
            plan_paged_attention(
                [len(span) for span in spans], seq_lens, torch.from_numpy(padded), layer.k,
                token_scale=layer.k_scale, backend=self._backend,
            ),
        )  # fmt: skip


def _tensor(numbers: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _slots(table: Sequence[int], positions: range, block_size: int) -> list[int]:
    """Where a sequence's tokens lie."""
    if len(positions) == 1:
        return [table[positions.start // block_size] * block_size + positions.start % block_size]
    slots: list[int] = []
    for index in range(positions.start // block_size, -(-positions.stop // block_size)):
        shift = (table[index] - index) * block_size
        within = range(index * block_size, (index + 1) * block_size)
        slots += range(max(positions.start, within.start) + shift, min(positions.stop, within.stop) + shift)
    return slots


def _hidden_rows(rows: Sequence[ScheduledRequest], requests: Sequence[RequestTokens], ends: Sequence[int]) -> list[int]:
    """Of the tokens whose hidden states are wanted. ends: by row, the number of tokens up to its last."""
    lasts: dict[int, int] = {}  # a request's last token in the step
    sampled, told = [], []
    for row, request, end in zip(rows, requests, ends, strict=True):
        lasts[row.request_id] = end - 1
        if row.samples:  # NOTE: a fork stands behind the row that it is forked from
            sampled.append(lasts[row.request_id if row.forked_from is None else row.forked_from])
        if request.sampling.prompt_logprobs is not None:
            shift = end - row.num_scheduled_tokens - row.num_computed_tokens - 1  # to the token before a position
            told += [position + shift for position in request.told_positions(row)]
    return sampled + told
