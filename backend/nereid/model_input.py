"""ModelInput: a step as tensors; and the batch state that turns a plan into one.

BatchState owns, for each request that the executor knows, its tokens and its block tables. Invariant: it follows the
plans exactly; a request's tokens are its prompt and all tokens drawn for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nereid.batch import NewRequest, ScheduledRequest, SchedulerOutput
from nereid.kv_cache.storage import KVCacheStorage
from nereid.request import SamplingParams
from nereid_kernels.kv_write import KVWritePlan, plan_kv_write
from nereid_kernels.paged_attention import AttentionPlan, plan_paged_attention


@dataclass(frozen=True, slots=True)
class ModelInput:
    """token_ids, positions: [tokens] int64.  hidden_rows: [rows] int64, tokens whose hidden states are wanted: the last
    of each row that samples, in their order, then those of prompts whose logprobs are told."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    hidden_rows: torch.Tensor
    kv_write: KVWritePlan
    attention: AttentionPlan


@dataclass(slots=True)
class RequestTokens:
    """One request behind the executor seam."""

    sampling: SamplingParams
    prompt_len: int
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)

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

    def __init__(self, backend: str) -> None:
        """backend: of `nereid_kernels.backends`, for which steps are planned."""
        self._backend = backend
        self._requests: dict[int, RequestTokens] = {}

    def __getitem__(self, request_id: int) -> RequestTokens:
        return self._requests[request_id]

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's news: forgotten requests, new ones, added blocks."""
        for request_id in plan.finished_ids:
            del self._requests[request_id]
        for new in plan.new_requests:
            self._add(new)
        for row in plan.scheduled:
            request = self._requests[row.request_id]
            if row.restarted:
                request.block_table.clear()
            request.block_table.extend(row.new_block_ids[0])

    def _add(self, new: NewRequest) -> None:
        prompt = list(new.prompt_token_ids)
        self._requests[new.request_id] = RequestTokens(new.sampling, len(prompt), prompt)

    def build(self, rows: tuple[ScheduledRequest, ...], cache: KVCacheStorage) -> ModelInput:
        """The tensors of a step with at least one row."""
        token_ids: list[int] = []
        positions, slots, tables, ends = [], [], [], []
        told: list[int] = []
        layer_view, _ = cache.layer(0)
        block_size = layer_view.shape[2]
        for row in rows:
            request = self._requests[row.request_id]
            end = row.num_computed_tokens + row.num_scheduled_tokens
            shift = len(token_ids) - row.num_computed_tokens - 1  # from a position to the token before it
            told += [position + shift for position in request.told_positions(row)]
            token_ids += request.token_ids[row.num_computed_tokens : end]
            table = torch.tensor(request.block_table)
            row_positions = torch.arange(row.num_computed_tokens, end)
            positions.append(row_positions)
            slots.append(table[row_positions // block_size] * block_size + row_positions % block_size)
            tables.append(table)
            if row.samples:
                ends.append(len(token_ids) - 1)
        query_lens = [row.num_scheduled_tokens for row in rows]
        seq_lens = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        return ModelInput(
            token_ids=torch.tensor(token_ids),
            positions=torch.cat(positions),
            hidden_rows=torch.tensor(ends + told, dtype=torch.int64),
            kv_write=plan_kv_write(torch.cat(slots), layer_view, backend=self._backend),
            attention=plan_paged_attention(query_lens, seq_lens, tables, layer_view, backend=self._backend),
        )
