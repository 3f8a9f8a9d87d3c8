"""paged_attention: causal attention of a step's queries over each sequence's blocks, any mix of query lengths.

Prefill, chunk, decode and verification differ by query length alone. Exact softmax; queries of one KV head are folded
into the query length, so that grouped-query attention reads each key and value once.

The CPU path gathers each sequence's keys and values by slot (`embedding`, torch's parallel row gather) and calls
scaled_dot_product_attention. Sequences with one query token and contexts of like length share one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from nereid_kernels.layout import flat_rows, row_index


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences of one query length that share a call: n sequences, q query tokens each, at most c context tokens.

    query_rows: [n * q] rows of the step's queries.  context_rows: [n, kv_heads, c] rows of a layer's view; a slot past
    a sequence's end points to its first slot, which is finite, and is masked.  mask: [n, 1, q, c] bool, true is seen.
    """

    query_rows: torch.Tensor
    context_rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share; made by `plan_paged_attention`."""

    buckets: tuple[_Bucket, ...]


def plan_paged_attention(
    query_lens: list[int], seq_lens: list[int], block_tables: list[torch.Tensor], cache: torch.Tensor
) -> AttentionPlan:
    """Prepare `paged_attention` for one step.

    query_lens, seq_lens: by sequence, the new tokens and the tokens in all (new ones included).
    block_tables: by sequence, block ids [>= ceil(seq_len / block size)] int64; block ids past that are not looked at.
    cache: a layer's K or V, [block, kv_head, slot, head_dim]; all layers must have its strides.
    Raises ValueError where a query is empty, longer than its sequence, or a table too short.
    """
    starts, start = [], 0
    block_size = cache.shape[2]
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        if not 1 <= query_len <= seq_len or len(table) * block_size < seq_len:
            raise ValueError(f"query {query_len}, sequence {seq_len}, {len(table)} blocks of {block_size}: no such row")
        starts.append(start)
        start += query_len
    buckets = [
        _bucket(members, starts, query_lens, seq_lens, block_tables, cache) for members in _group(query_lens, seq_lens)
    ]
    return AttentionPlan(tuple(buckets))


def paged_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Attention output [tokens, heads, head_dim], where query has that shape too.

    k_cache, v_cache: a layer's views, [block, kv_head, slot, head_dim], the step's own tokens already written.
    scale: what query x key products are multiplied by before the softmax.
    """
    if query.device.type != "cpu":
        raise ValueError(f"paged_attention has no implementation for device {query.device}")
    output = torch.empty_like(query)
    keys, values = flat_rows(k_cache), flat_rows(v_cache)
    for bucket in plan.buckets:
        output[bucket.query_rows] = _attend(query, keys, values, bucket, scale)
    return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bucket: _Bucket, scale: float
) -> torch.Tensor:
    """[n * q, heads, head_dim]"""
    n, kv_heads, _ = bucket.context_rows.shape
    q = bucket.mask.shape[2]
    heads, head_dim = query.shape[1:]
    group = heads // kv_heads
    folded = query[bucket.query_rows].view(n, q, kv_heads, group, head_dim)
    folded = folded.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, group * q, head_dim)
    k = functional.embedding(bucket.context_rows, keys)  # [n, kv_heads, c, head_dim]
    v = functional.embedding(bucket.context_rows, values)
    mask = bucket.mask.repeat(1, 1, group, 1) if q > 1 else bucket.mask
    out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(n, kv_heads, group, q, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(n * q, heads, head_dim)


def _group(query_lens: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Which sequences share a call: decodes whose lengths round up to one power of two; each other by itself."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        key = (0, seq_len.bit_length()) if query_len == 1 else (1, index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _bucket(
    members: list[int],
    starts: list[int],
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[torch.Tensor],
    cache: torch.Tensor,
) -> _Bucket:
    block_size = cache.shape[2]
    q = query_lens[members[0]]
    lens = torch.tensor([seq_lens[m] for m in members])
    context = int(lens.max())
    num_blocks = -(-context // block_size)
    tables = torch.zeros(len(members), num_blocks, dtype=torch.int64)
    for row, member in enumerate(members):
        used = -(-seq_lens[member] // block_size)
        tables[row, :used] = block_tables[member][:used]
    positions = torch.arange(context)
    # A slot past the end reads the sequence's first slot instead: whatever lies unwritten, NaN too, is never read.
    clipped = torch.where(positions < lens[:, None], positions, 0)
    rows = row_index(cache, tables.gather(1, clipped // block_size).view(-1), (clipped % block_size).view(-1))
    context_rows = rows.view(len(members), context, -1).transpose(1, 2).contiguous()
    query_positions = lens[:, None] - q + torch.arange(q)  # [n, q]
    mask = positions <= query_positions[:, :, None]  # [n, q, c]
    query_rows = torch.tensor([starts[m] for m in members])[:, None] + torch.arange(q)
    return _Bucket(query_rows.view(-1), context_rows, mask[:, None])
