"""paged_attention by its definition: each sequence's keys and values gathered, the whole score matrix written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nereid_kernels.reference.kv_write import dequantise
from nereid_kernels.splitting import MAX_TREE


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: list[Tensor],
    query_lens: list[int],
    seq_lens: list[int],
    scale: float,
    *,
    window: int = 0,
    num_sink_tokens: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    ancestors: Tensor | None = None,
    positions: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """[tokens, heads, head_dim] of query's dtype; block_tables, query_lens and seq_lens by sequence; the rest as the
    wrapper documents it."""
    out = torch.zeros_like(query)
    start = 0
    for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
        rows, context_len = slice(start, start + query_len), seq_len - query_len
        start += query_len
        if query_len == 0:
            continue
        key_at = torch.arange(seq_len)
        query_at = torch.arange(context_len, seq_len)
        seen = key_at <= query_at[:, None]
        if ancestors is not None and positions is not None and query_len <= MAX_TREE:
            query_at = positions[rows].long()
            key_at = torch.cat((torch.arange(context_len), query_at))
            bits = (ancestors[rows, None] >> torch.arange(len(query_at))) & 1
            seen = torch.cat((torch.ones(len(query_at), context_len, dtype=torch.bool), bits.bool()), dim=1)
        distance = query_at[:, None] - key_at  # [query, key]
        if window:
            seen = seen & ((distance < window) | (key_at < num_sink_tokens))
        k = gather(k_cache, table, seq_len, k_scale, query.dtype)
        v = gather(v_cache, table, seq_len, v_scale, query.dtype)
        bias = None if alibi_slopes is None else -alibi_slopes.to(query.dtype)[:, None, None] * distance
        out[rows] = _attend(query[rows], k, v, seen, scale, soft_cap, sinks, bias)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """query: [q, heads, d].  key, value: [c, kv_heads, d].  seen: [q, c].  bias: [heads, q, c]."""
    unseen = ~seen.any(dim=0)[:, None, None]  # by any query: such keys may be NaN
    key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,chd->hqc", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)  # a row that sees nothing
    return torch.einsum("hqc,chd->qhd", weights[..., : len(key)], value)


def gather(cache: Tensor, table: Tensor, seq_len: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The first seq_len slots of a sequence in `dtype`, [seq_len, kv_heads, head_dim], with their scale applied."""
    at = torch.arange(seq_len)
    blocks, slots = table.long()[at // cache.shape[2]], at % cache.shape[2]
    rows = cache[blocks, :, slots]
    if scale is not None:
        scale = scale[blocks, :, slots] if scale.dim() == 3 else scale.expand(rows.shape[:2])
    return dequantise(rows, None if scale is None else scale[..., None], dtype)
