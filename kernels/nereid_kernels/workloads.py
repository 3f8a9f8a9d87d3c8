"""Launches of realistic size: what the roofline counts, what is tuned, and what is timed on a GPU.

Shapes are those of Llama-3.1-8B, and of DeepSeek-V3 for MLA. Always holds: every operation is among WORKLOADS.
On the meta device nothing but the lengths has values; those lie on the CPU then, where a formula can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from nereid_kernels.launch import Launch

Make = Callable[..., Sequence[Launch]]
"""(device, architecture=None) -> the launches of one call; architecture: the device's own, where it is left out."""

_DTYPE = torch.bfloat16
_BLOCK_SIZE = 16
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_IN, _OUT = 4096, 14336  # of the feed-forward layer
_VOCAB = 128256
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
    """A float8 cache has a scale for each token and head."""
    from nereid_kernels.triton_lang.kv_write import launch_kv_write

    key, value = _normal(device, 2, tokens, _KV_HEADS, _HEAD_DIM)
    (k_cache, v_cache), slot_mapping = _cache(device, tokens)
    k_scale, v_scale = None, None
    if cache_dtype != _DTYPE:
        k_scale, v_scale = torch.zeros(2, *k_cache.shape[:3], device=device)
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
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.paged_attention import Operands, launch_paged_attention

    query, out = _normal(device, 2, seqs * query_len, heads, head_dim)
    tables, cu_query_lens, seq_lens = _batch(device, seqs, query_len, seq_len)
    k_cache, v_cache = _normal(device, 2, tables.numel() + 1, kv_heads, _BLOCK_SIZE, head_dim)
    operands = Operands(query, k_cache, v_cache, out, tables, cu_query_lens, seq_lens)
    return launch_paged_attention(operands, query_len, head_dim**-0.5, 0, 0.0, architecture)


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


def sample(
    device: torch.device, architecture: str | None = None, *, rows: int, temperature: float, top_p: float
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.sample import launch_sample

    logits, zeros = 4 * torch.randn(rows, _VOCAB, device=device), torch.zeros(rows, device=device)
    keys, tokens = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    chosen = (zeros + temperature, zeros, zeros.int(), zeros + top_p)
    return [launch_sample(logits, *chosen, keys, tokens, zeros.bool(), architecture)]


def penalties(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.penalties import launch_penalties

    logits, zeros = torch.randn(rows, _VOCAB, device=device), torch.zeros(rows, device=device)
    counts = torch.ones(rows, _VOCAB, dtype=torch.int32, device=device)
    return [launch_penalties(logits, counts, counts.bool(), zeros + 1.1, zeros + 0.1, zeros + 0.1, architecture)]


def grammar_mask(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.grammar_mask import launch_grammar_mask

    bitmask = torch.zeros(rows, -(-_VOCAB // 32), dtype=torch.int32, device=device)
    return [launch_grammar_mask(torch.randn(rows, _VOCAB, device=device), bitmask, None, architecture)]


def verify_draft(
    device: torch.device, architecture: str | None = None, *, seqs: int, draft_len: int
) -> Sequence[Launch]:
    """Of drafters that say how probable they held each token."""
    from nereid_kernels.triton_lang.verify_draft import launch_chain

    target = torch.full((seqs * (draft_len + 1), _VOCAB), 1 / _VOCAB, device=device)
    drafts = torch.arange(seqs * draft_len, dtype=torch.int32, device=device)
    offsets = draft_len * torch.arange(seqs + 1, dtype=torch.int32, device=device)
    keys, accepted = torch.arange(len(target), device=device), torch.zeros(seqs, dtype=torch.int32, device=device)
    ids = torch.zeros(seqs, draft_len + 1, dtype=torch.int64, device=device)
    return [launch_chain(target, target[: len(drafts)], drafts, offsets, keys, None, accepted, ids, architecture)]


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


WORKLOADS: Mapping[tuple[str, str], Make] = MappingProxyType(
    {
        ("rms_norm", "64 x 4096"): partial(add_rms_norm, rows=64, width=4096),
        ("rms_norm", "1024 x 2048"): partial(add_rms_norm, rows=1024, width=2048),
        ("rms_norm", "1024 x 4096"): partial(add_rms_norm, rows=1024, width=4096),
        ("rms_norm", "1024 x 16384"): partial(add_rms_norm, rows=1024, width=16384),
        ("rms_norm", "8192 x 4096"): partial(add_rms_norm, rows=8192, width=4096),
        ("matmul", "64 x 4096 x 14336"): partial(matmul, rows=64),
        ("matmul", "512 x 4096 x 14336"): partial(matmul, rows=512),
        ("matmul", "8192 x 4096 x 14336"): partial(matmul, rows=8192),
        ("quantised_matmul", "int8 64 x 4096 x 14336"): partial(matmul_int8, rows=64),
        ("quantised_matmul", "int8 8192 x 4096 x 14336"): partial(matmul_int8, rows=8192),
        ("quantised_matmul", "int4 64 x 4096 x 14336"): partial(matmul_int4, rows=64),
        ("quantised_matmul", "int4 8192 x 4096 x 14336"): partial(matmul_int4, rows=8192),
        ("gated_activation", "64 x 14336"): partial(gated_activation, rows=64, width=14336),
        ("gated_activation", "8192 x 14336"): partial(gated_activation, rows=8192, width=14336),
        ("kv_write", "64 tokens"): partial(kv_write, tokens=64),
        ("kv_write", "8192 tokens"): partial(kv_write, tokens=8192),
        ("kv_write", "8192 tokens, e4m3"): partial(kv_write, tokens=8192, cache_dtype=torch.float8_e4m3fn),
        ("qk_norm_rope_kv_write", "64 tokens"): partial(qk_norm_rope_kv_write, tokens=64),
        ("qk_norm_rope_kv_write", "8192 tokens"): partial(qk_norm_rope_kv_write, tokens=8192),
        ("paged_attention", "decode 64 x 4096"): partial(paged_attention, seqs=64, query_len=1, seq_len=4096),
        ("paged_attention", "decode 1 x 65536"): partial(paged_attention, seqs=1, query_len=1, seq_len=65536),
        ("paged_attention", "verify 64 x 8, 4096"): partial(paged_attention, seqs=64, query_len=8, seq_len=4096),
        ("paged_attention", "prefill 8192"): partial(paged_attention, seqs=1, query_len=8192, seq_len=8192),
        ("mla_attention", "decode 64 x 4096"): partial(mla_attention, seqs=64, query_len=1, seq_len=4096),
        ("mla_attention", "prefill 8192"): partial(mla_attention, seqs=1, query_len=8192, seq_len=8192),
        ("block_ops", "copy 1024 blocks"): partial(copy_blocks, blocks=1024),
        ("sample", "greedy 64"): partial(sample, rows=64, temperature=0.0, top_p=1.0),
        ("sample", "random 64"): partial(sample, rows=64, temperature=1.0, top_p=1.0),
        ("sample", "top_p 64"): partial(sample, rows=64, temperature=1.0, top_p=0.9),
        ("penalties", "64 rows"): partial(penalties, rows=64),
        ("grammar_mask", "64 rows"): partial(grammar_mask, rows=64),
        ("verify_draft", "64 x 4"): partial(verify_draft, seqs=64, draft_len=4),
    }
)
"""(operation, shape) -> its launches. Operations have the names of this package's modules."""
