"""mla_attention on the CPU, in float32: each sequence's rows are gathered, and its heads folded into the queries."""

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
    for index, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        seq_len = int(seq_lens[index])
        if seq_len and end > start:
            keys = _gather(cache, block_tables[index], seq_len).float()
            out[start:end] = _attend(query[start:end].float(), keys, scale, latent_dim).to(query.dtype)
    return out


def _gather(cache: Tensor, table: Tensor, seq_len: int) -> Tensor:
    """[seq_len, latent + rope]; no slot past the end is read."""
    positions = torch.arange(seq_len)
    block_size = cache.shape[2]
    return cache[table[positions // block_size].long(), 0, positions % block_size]


def _attend(query: Tensor, keys: Tensor, scale: float, latent_dim: int) -> Tensor:
    """query: [q, heads, latent + rope], the last q positions.  keys: [c, latent + rope].  -> [q, heads, latent]"""
    q, heads, _ = query.shape
    scores = query.flatten(0, 1) @ keys.T * scale  # [q * heads, c]
    positions = torch.arange(len(keys))
    is_hidden = positions > len(keys) - q + torch.arange(q)[:, None]  # [q, c]
    scores.view(q, heads, -1).masked_fill_(is_hidden[:, None], -math.inf)
    weights = scores.softmax(dim=-1)
    weights.view(q, heads, -1).masked_fill_(is_hidden[:, None], 0.0)  # NaN in a row that sees no key
    return (weights @ keys[:, :latent_dim]).view(q, heads, latent_dim)
