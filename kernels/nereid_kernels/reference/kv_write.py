"""kv_write by its definition, and how a key or value is quantised.

A quantised cache holds x / scale, rounded to nearest even and saturated; its value is what it holds times the scale.
int8 with a scale for each token and head has an offset, too: it holds (x - offset) / scale, and the offset is added to
its value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.formats import (
    LARGEST_WITH_OFFSET,
    QUANTISED,
    SMALLEST_SCALE,
    largest,
    pack_scales,
    unpack_scales,
)


def token_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] for x [..., head_dim]: each row's scale, of int8 with its offset, as a cache of `dtype` holds it."""
    return range_scale(x) if dtype == torch.int8 else absmax_scale(x, dtype)


def absmax_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] float32 for x [..., head_dim]: the scale that maps each row's largest magnitude to that of `dtype`.

    A NaN counts for nothing, an infinity as the largest float32.
    """
    magnitude = x.float().abs().nan_to_num(nan=0.0)
    return (magnitude.amax(dim=-1) / largest(dtype)).clamp_min(SMALLEST_SCALE)


def range_scale(x: Tensor) -> Tensor:
    """[...] int32 for x [..., head_dim]: the offset is the middle of each row's range, and the scale maps what lies
    farthest from it to 127; see formats.

    A NaN counts for nothing, an infinity as LARGEST_WITH_OFFSET. The offset is rounded first, then the scale, upwards.
    """
    x = _within(x.float())
    low, high = x.nan_to_num(nan=LARGEST_WITH_OFFSET).amin(dim=-1), x.nan_to_num(nan=-LARGEST_WITH_OFFSET).amax(dim=-1)
    offset = (low / 2 + high / 2 + 0.0).bfloat16().float()  # a zero without a sign
    reach = torch.maximum(high - offset, offset - low)
    scale = (reach / largest(torch.int8)).clamp_min(SMALLEST_SCALE)
    return pack_scales(_rounded_up(scale), offset)


def _within(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_WITH_OFFSET, LARGEST_WITH_OFFSET)


def _rounded_up(x: Tensor) -> Tensor:
    """Positive numbers, to bfloat16, as float32."""
    return (x.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)


def quantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, or (x - offset) / scale. A NaN stays one in float8, and becomes 0 in int8.

    scale: broadcasts with x; int32: with an offset, see formats; None is 1.
    """
    scaled = x.float()
    if scale is not None and scale.dtype == torch.int32:
        scale, offset = unpack_scales(scale)
        scaled = _within(scaled) - offset
    if scale is not None:
        scaled = scaled / scale
    scaled = scaled.clamp(-largest(dtype), largest(dtype))
    return scaled.to(dtype) if dtype.is_floating_point else scaled.nan_to_num(nan=0.0).round().to(dtype)


def dequantise(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache's elements stand for, in `dtype`.  scale: as in `quantise`."""
    if scale is None or scale.dtype != torch.int32:
        return codes.to(dtype) if scale is None else codes.to(dtype) * scale.to(dtype)
    scale, offset = unpack_scales(scale)
    wide = torch.promote_types(dtype, torch.float32)  # in which the product is exact
    return (codes.to(wide) * scale + offset).to(dtype)


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
        scale[block, :, offset] = token_scale(row, cache.dtype)
        scale = scale[block, :, offset]
    cache[block, :, offset] = quantise(row, None if scale is None else scale.reshape(-1, 1), cache.dtype)
