"""Launches of realistic size, for the roofline and for tuning: shapes of Llama-3.1-8B, and of DeepSeek-V3 for MLA.

On the meta device nothing but the lengths has values; those lie on the CPU then, where a formula can read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of

_DTYPE = torch.bfloat16
_BLOCK_SIZE = 16


def add_rms_norm(device: torch.device, architecture: str | None = None, *, rows: int, width: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.rms_norm import launch_rms_norm

    x, residual, out, total = _normal(device, 4, rows, width)
    return [launch_rms_norm(x, residual, _normal(device, width), out, total, 1e-5, 0.0, architecture)]


def matmul(
    device: torch.device, architecture: str | None = None, *, rows: int, in_features: int, out_features: int
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.matmul import launch_matmul

    x, out = _normal(device, rows, in_features), _normal(device, rows, out_features)
    return [launch_matmul(x, _normal(device, out_features, in_features), None, out, architecture)]


def paged_attention(
    device: torch.device,
    architecture: str | None = None,
    *,
    seqs: int,
    query_len: int,
    seq_len: int,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.paged_attention import Operands, SplitShape, launch_paged_attention

    query, out = _normal(device, 2, seqs * query_len, heads, head_dim)
    tables, cu_query_lens, seq_lens = _batch(device, seqs, query_len, seq_len)
    k_cache, v_cache = _normal(device, 2, tables.numel() + 1, kv_heads, _BLOCK_SIZE, head_dim)
    split = SplitShape.of(query_len, kv_heads, architecture or architecture_of(device))
    workspace = torch.empty(split.workspace(seqs, heads, head_dim), dtype=torch.float32, device=device)
    operands = Operands(query, k_cache, v_cache, out, workspace, tables, cu_query_lens, seq_lens)
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


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=_DTYPE, device=device)


def _batch(device: torch.device, seqs: int, query_len: int, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables in random order, cu_query_lens, seq_lens."""
    place = torch.device("cpu") if device.type == "meta" else device
    max_blocks = -(-seq_len // _BLOCK_SIZE)
    tables = 1 + torch.randperm(seqs * max_blocks, device=place).int().view(seqs, max_blocks)
    cu_query_lens = torch.arange(seqs + 1, dtype=torch.int32, device=place) * query_len
    return tables, cu_query_lens, torch.full((seqs,), seq_len, dtype=torch.int32, device=place)
