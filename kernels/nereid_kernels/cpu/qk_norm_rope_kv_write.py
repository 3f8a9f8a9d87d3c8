"""qk_norm_rope_kv_write on the CPU: its parts one after another, queries and keys turned together."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.cpu.kv_write import Slots, kv_write
from nereid_kernels.cpu.rms_norm import rms_norm
from nereid_kernels.reference.qk_norm_rope_kv_write import rotate


def qk_norm_rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Slots,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    rows = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    heads = rows.shape[1] - 2 * kv_heads
    turned, value = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
    if q_weight is not None and k_weight is not None:
        query, key = turned[:, :heads], turned[:, heads:]
        query, key = rms_norm(query, q_weight, eps, weight_offset), rms_norm(key, k_weight, eps, weight_offset)
        turned = torch.cat((query, key), dim=1)
    turned = rotate(turned.float(), cos_sin).to(qkv.dtype)
    kv_write(turned[:, heads:], value, k_cache, v_cache, slots, k_scale, v_scale)
    return turned[:, :heads]
