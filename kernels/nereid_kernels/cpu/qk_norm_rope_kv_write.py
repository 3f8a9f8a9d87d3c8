"""qk_norm_rope_kv_write on the CPU: its parts one after another, queries and keys turned together."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.cpu.kv_write import Slots, kv_write
from nereid_kernels.cpu.rms_norm import rms_norm


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
    turned = _rotate(turned.float(), cos_sin).to(qkv.dtype)
    kv_write(turned[:, heads:], value, k_cache, v_cache, slots, k_scale, v_scale)
    return turned[:, :heads]


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim] float32.  cos_sin: [tokens, 2, rotary_dim]."""
    rotary_dim = cos_sin.shape[-1]
    half = rotary_dim // 2
    cos, sin = cos_sin.float()[:, :, None].unbind(dim=1)  # each [tokens, 1, rotary_dim]
    low, high, rest = x.tensor_split((half, rotary_dim), dim=-1)
    turned_low = low * cos[..., :half] - high * sin[..., :half]
    turned_high = high * cos[..., half:] + low * sin[..., half:]
    return torch.cat((turned_low, turned_high, rest), dim=-1)
