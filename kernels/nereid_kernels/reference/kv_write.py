"""kv_write by its definition, and how a key or value is quantised.

A quantised cache holds x / scale, rounded to nearest even and saturated; its value is what it holds times the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.formats import QUANTISED, SMALLEST_SCALE, largest


def absmax_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] float32 for x [..., head_dim]: the scale that maps each row's largest magnitude to that of `dtype`.

    A NaN counts for nothing, an infinity as the largest float32.
    """
    magnitude = x.float().abs().nan_to_num(nan=0.0)
    return (magnitude.amax(dim=-1) / largest(dtype)).clamp_min(SMALLEST_SCALE)


def quantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`. A NaN stays one in float8, and becomes 0 in int8.  scale: broadcasts with x; None is 1."""
    scaled = x.float() if scale is None else x.float() / scale
    scaled = scaled.clamp(-largest(dtype), largest(dtype))
    return scaled.to(dtype) if dtype.is_floating_point else scaled.nan_to_num(nan=0.0).round().to(dtype)


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """key, value: [tokens, kv_heads, head_dim].  k_cache, v_cache: [block, kv_head, slot, head_dim]."""
    for rows, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
            if slot >= 0:
                _store_row(row, cache, slot // cache.shape[2], slot % cache.shape[2], scale)


def _store_row(row: Tensor, cache: Tensor, block: int, offset: int, scale: Tensor | None) -> None:
    """row: [kv_heads, head_dim].  A scale for each token is computed here, and stored."""
    if cache.dtype not in QUANTISED:
        cache[block, :, offset] = row
        return
    if scale is not None and scale.dim() == 3:
        scale[block, :, offset] = absmax_scale(row, cache.dtype)
        scale = scale[block, :, offset]
    cache[block, :, offset] = quantise(row, None if scale is None else scale.reshape(-1, 1), cache.dtype)
