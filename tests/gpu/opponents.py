"""What paged_attention is compared with on a GPU: the same queries over as many keys, by others' kernels.

Each function takes the arguments of paged_attention's launch, and returns what starts the other kernel. torch's two
read keys and values that lie contiguously, sequence by sequence, which spares them the block table.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.gpu.measure import Start

Opponent = Callable[[Mapping[str, Any]], Start]


def available() -> dict[str, Opponent]:
    """All but flex, which is compiled for each problem."""
    others: dict[str, Opponent] = {"sdpa": sdpa}
    return others | ({"flashinfer": flashinfer} if importlib.util.find_spec("flashinfer") else {})


def sdpa(a: Mapping[str, Any]) -> Start:
    """torch's scaled_dot_product_attention. Heads that share keys become rows where queries are short."""
    query, key, value = _dense(a)
    seqs, heads, query_len, head_dim = query.shape
    kv_heads, seq_len = key.shape[1:3]
    if query_len == seq_len:
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    group = heads // kv_heads
    rows = query.reshape(seqs, kv_heads, group * query_len, head_dim)
    positions = torch.arange(seq_len, device=query.device)
    seen = positions <= positions[-query_len:, None]  # [query_len, seq_len]
    mask = seen.repeat(group, 1) if query_len > 1 else None
    return lambda: scaled_dot_product_attention(rows, key, value, attn_mask=mask)


def flex(a: Mapping[str, Any]) -> Start:
    """torch's flex_attention, compiled for this very shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = _dense(a)
    query_len, seq_len = query.shape[2], key.shape[2]
    context_len = seq_len - query_len

    def sees(seq: Tensor, head: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
        return query_at + context_len >= key_at

    mask = create_block_mask(sees, None, None, query_len, seq_len, device=str(query.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)


def flashinfer(a: Mapping[str, Any]) -> Start:
    """FlashInfer over the same blocks; decode by its own kernel for that."""
    library = importlib.import_module("flashinfer")
    query, caches, tables = a["query_ptr"], (a["k_ptr"], a["v_ptr"]), a["block_tables_ptr"]
    heads, head_dim = query.shape[1:]
    seqs, max_blocks = tables.shape
    _, kv_heads, block_size, _ = caches[0].shape
    bounds = max_blocks * torch.arange(seqs + 1, dtype=torch.int32, device=query.device)
    last = torch.full((seqs,), block_size, dtype=torch.int32, device=query.device)
    shape = (bounds, tables.flatten(), last, heads, kv_heads, head_dim, block_size)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=query.device)
    if len(query) == seqs:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*shape, q_data_type=query.dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(a["cu_query_lens_ptr"], *shape, causal=True, q_data_type=query.dtype)
    return lambda: wrapper.run(query, caches)


def _dense(a: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [seqs, heads, query_len, head_dim]; the caches' memory as [seqs, kv_heads, seq_len, head_dim]."""
    query, tables = a["query_ptr"], a["block_tables_ptr"]
    seqs, max_blocks = tables.shape
    _, kv_heads, block_size, head_dim = a["k_ptr"].shape
    shape = (seqs, kv_heads, max_blocks * block_size, head_dim)
    keys, values = (a[name][1:].view(shape) for name in ("k_ptr", "v_ptr"))  # block 0 belongs to nobody
    return query.view(seqs, -1, *query.shape[1:]).transpose(1, 2).contiguous(), keys, values
