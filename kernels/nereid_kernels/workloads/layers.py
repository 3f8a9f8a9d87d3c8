"""Launches of what a layer does with a step's tokens, and of what moves blocks of its cache.

Shapes are those of Llama-3.1-8B, and of DeepSeek-V3 for MLA. On the meta device nothing but the lengths has values;
those lie on the CPU then, where a formula can read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nereid_kernels.formats import scale_dtype
from nereid_kernels.launch import Launch
from nereid_kernels.splitting import SPLIT_QUERY

_DTYPE = torch.bfloat16
_BLOCK_SIZE = 16
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_IN, _OUT = 4096, 14336  # of the feed-forward layer
_GROUP = 128  # inputs that share a scale of int4


def add_rms_norm(device: torch.device, architecture: str | None = None, *, rows: int, width: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.rms_norm import launch_rms_norm

    x, residual, out, total = _normal(device, 4, rows, width)
    return [launch_rms_norm(x, residual, _normal(device, width), out, total, 1e-5, 0.0, architecture)]


def matmul(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.matmul import launch_matmul

    x, out = _normal(device, rows, _IN), _normal(device, rows, _OUT)
    return [launch_matmul(x, _normal(device, _OUT, _IN), None, out, architecture)]


def matmul_int8(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.quantised_matmul import launch_matmul_int8

    x, out = _normal(device, rows, _IN), _normal(device, rows, _OUT)
    weight = torch.ones(_OUT, _IN, dtype=torch.int8, device=device)
    return [launch_matmul_int8(x, weight, _normal(device, _OUT), out, architecture)]


def matmul_int4(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.quantised_matmul import launch_matmul_int4

    x, out = _normal(device, rows, _IN), _normal(device, rows, _OUT)
    packed = torch.ones(_OUT, _IN // 2, dtype=torch.uint8, device=device)
    scales = _normal(device, _OUT, _IN // _GROUP)
    return [launch_matmul_int4(x, packed, scales, None, out, _GROUP, architecture)]


def gated_activation(
    device: torch.device, architecture: str | None = None, *, rows: int, width: int
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.gated_activation import launch_gated_activation

    gate_up, out = _normal(device, rows, 2 * width), _normal(device, rows, width)
    return [launch_gated_activation(gate_up, out, "silu", architecture)]


def kv_write(
    device: torch.device, architecture: str | None = None, *, tokens: int, cache_dtype: torch.dtype = _DTYPE
) -> Sequence[Launch]:
    """A quantised cache has a scale for each token and head."""
    from nereid_kernels.triton_lang.kv_write import launch_kv_write

    key, value = _normal(device, 2, tokens, _KV_HEADS, _HEAD_DIM)
    (k_cache, v_cache), slot_mapping = _cache(device, tokens)
    k_scale, v_scale = None, None
    if cache_dtype != _DTYPE:
        dtype = scale_dtype(cache_dtype, by_token=True)
        k_scale, v_scale = torch.zeros(2, *k_cache.shape[:3], dtype=dtype, device=device)
    caches = k_cache.to(cache_dtype), v_cache.to(cache_dtype)
    return [launch_kv_write(key, value, *caches, slot_mapping, k_scale, v_scale, architecture)]


def qk_norm_rope_kv_write(device: torch.device, architecture: str | None = None, *, tokens: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.qk_norm_rope_kv_write import launch_qk_norm_rope_kv_write

    qkv, query = (
        _normal(device, tokens, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM),
        _normal(device, tokens, _HEADS, _HEAD_DIM),
    )
    cos_sin = torch.ones(tokens, 2, _HEAD_DIM, device=device)
    q_weight, k_weight = _normal(device, 2, _HEAD_DIM)
    (k_cache, v_cache), slot_mapping = _cache(device, tokens)
    written = (query, k_cache, v_cache, slot_mapping)
    return [
        launch_qk_norm_rope_kv_write(
            qkv, cos_sin, *written, q_weight, k_weight, 1e-6, 0.0, None, None, architecture=architecture
        )
    ]


def paged_attention(
    device: torch.device,
    architecture: str | None = None,
    *,
    seqs: int,
    query_len: int,
    seq_len: int,
    heads: int = _HEADS,
    kv_heads: int = _KV_HEADS,
    head_dim: int = _HEAD_DIM,
    window: int = 0,
    num_sink_tokens: int = 0,
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.paged_attention import Operands, launch_paged_attention

    query, out = _normal(device, 2, seqs * query_len, heads, head_dim)
    tables, cu_query_lens, seq_lens = _batch(device, seqs, query_len, seq_len)
    k_cache, v_cache = _normal(device, 2, tables.numel() + 1, kv_heads, _BLOCK_SIZE, head_dim)
    operands = Operands(query, k_cache, v_cache, out, tables, cu_query_lens, seq_lens)
    longest = (query_len, 0) if query_len <= SPLIT_QUERY else (0, query_len)
    return launch_paged_attention(operands, *longest, head_dim**-0.5, window, num_sink_tokens, 0.0, architecture)


def mla_attention(
    device: torch.device, architecture: str | None = None, *, seqs: int, query_len: int, seq_len: int, heads: int = 128
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.mla_attention import launch_mla_attention

    latent, rope = 512, 64
    query, out = (
        _normal(device, seqs * query_len, heads, latent + rope),
        _normal(device, seqs * query_len, heads, latent),
    )
    tables, cu_query_lens, seq_lens = _batch(device, seqs, query_len, seq_len)
    cache = _normal(device, tables.numel() + 1, 1, _BLOCK_SIZE, latent + rope)
    return launch_mla_attention(query, cache, tables, cu_query_lens, seq_lens, out, query_len, 0.1, architecture)


def copy_blocks(device: torch.device, architecture: str | None = None, *, blocks: int) -> Sequence[Launch]:
    """Of one layer's keys and values."""
    from nereid_kernels.triton_lang.block_ops import launch_copy_blocks

    pool = _normal(device, 2 * blocks, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)
    pairs = torch.arange(2 * blocks, device=device).view(2, blocks).T.contiguous()
    return [launch_copy_blocks(pool, pairs, architecture)]


def gather_blocks(device: torch.device, architecture: str | None = None, *, blocks: int) -> Sequence[Launch]:
    """Out of one layer's keys and values, as for a transfer."""
    from nereid_kernels.triton_lang.block_ops import launch_gather_blocks

    pool, out = (_normal(device, n, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM) for n in (2 * blocks, blocks))
    return [launch_gather_blocks(pool, torch.randperm(2 * blocks, device=device)[:blocks], out, architecture)]


def scatter_blocks(device: torch.device, architecture: str | None = None, *, blocks: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.block_ops import launch_scatter_blocks

    pool, source = (_normal(device, n, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM) for n in (2 * blocks, blocks))
    return [launch_scatter_blocks(pool, torch.randperm(2 * blocks, device=device)[:blocks], source, architecture)]


def _cache(device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    """(keys and values [2, block, kv_head, slot, head_dim], the slots of the tokens in random order)."""
    blocks = 2 + tokens // _BLOCK_SIZE
    slots = _BLOCK_SIZE + torch.randperm(tokens, device=device)
    return _normal(device, 2, blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM), slots


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=_DTYPE, device=device)


def _batch(device: torch.device, seqs: int, query_len: int, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables in random order, cu_query_lens, seq_lens."""
    place = torch.device("cpu") if device.type == "meta" else device
    max_blocks = -(-seq_len // _BLOCK_SIZE)
    tables = 1 + torch.randperm(seqs * max_blocks, device=place).int().view(seqs, max_blocks)
    cu_query_lens = torch.arange(seqs + 1, dtype=torch.int32, device=place) * query_len
    return tables, cu_query_lens, torch.full((seqs,), seq_len, dtype=torch.int32, device=place)
