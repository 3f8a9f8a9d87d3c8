"""qk_norm_rope_kv_write by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.reference.kv_write import kv_write
from nereid_kernels.reference.rms_norm import rms_norm


def split_heads(qkv: Tensor, k_cache: Tensor) -> tuple[Tensor, ...]:
    """(query, key, value), each [tokens, heads, head_dim]; a view of qkv."""
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    rows = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    return rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary position embedding of the first rotary_dim columns; columns d and d + rotary_dim / 2 are a pair.

    x: [tokens, heads, head_dim].  cos_sin: [tokens, 2, rotary_dim].
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.to(x.dtype)[:, :, None].unbind(dim=1)  # each [tokens, 1, rotary_dim]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    low, high = rotated.chunk(2, dim=-1)
    return torch.cat([rotated * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


def qk_norm_rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """qkv: [tokens, (heads + 2 * kv_heads) * head_dim].  Returns the queries, [tokens, heads, head_dim]."""
    query, key, value = split_heads(qkv, k_cache)
    if q_weight is not None and k_weight is not None:
        query, key = rms_norm(query, q_weight, eps, weight_offset), rms_norm(key, k_weight, eps, weight_offset)
    query, key = rotate(query, cos_sin), rotate(key, cos_sin)
    kv_write(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return query
