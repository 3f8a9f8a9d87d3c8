"""mla_attention by its definition, one sequence after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mla_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    latent_dim: int,
) -> Tensor:
    """Shapes as in `nereid_kernels.mla_attention`. Query tokens that belong to no sequence are 0."""
    out = query.new_zeros(*query.shape[:2], latent_dim)
    starts = cu_query_lens.tolist()
    for start, end, seq_len, table in zip(starts, starts[1:], seq_lens.tolist(), block_tables, strict=False):
        if seq_len and end > start:
            keys = _sequence_rows(cache, table, seq_len)
            scores = torch.einsum("qhd,cd->hqc", query[start:end], keys) * scale
            positions = torch.arange(seq_len - (end - start), seq_len)
            is_seen = torch.arange(seq_len) <= positions[:, None]
            weights = scores.masked_fill(~is_seen, -math.inf).softmax(dim=-1).masked_fill(~is_seen, 0.0)
            out[start:end] = torch.einsum("hqc,cd->qhd", weights, keys[:, :latent_dim])
    return out


def _sequence_rows(cache: Tensor, table: Tensor, seq_len: int) -> Tensor:
    """The rows that a sequence has in the cache, [seq_len, latent + rope]."""
    block_size = cache.shape[2]
    blocks = table[: -(-seq_len // block_size)].long()
    return cache[blocks, 0].flatten(0, 1)[:seq_len]
