"""kv_write on the CPU. Always holds: a quantised cache gets the very bits that the definition gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_kernels.cpu.layout import flat_rows, row_index
from nereid_kernels.formats import LARGEST_WITH_OFFSET, SMALLEST_SCALE, largest, pack_scales, unpack_scales


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a step's tokens go, worked out once for all layers.

    tokens: [n] which of the step's tokens are stored, or None for all.  blocks, offsets: [n] their slots.
    rows: [n * kv_heads] head_dim-wide rows of a layer's view.
    """

    tokens: Tensor | None
    blocks: Tensor
    offsets: Tensor
    rows: Tensor


def plan_slots(slot_mapping: Tensor, cache: Tensor) -> Slots:
    """cache: a layer's K or V. Raises ValueError where it is not laid out as a block-major pool is."""
    padded = bool((slot_mapping < 0).any())
    tokens = (slot_mapping >= 0).nonzero()[:, 0] if padded else None
    slots = slot_mapping if tokens is None else slot_mapping[tokens]
    blocks, offsets = slots // cache.shape[2], slots % cache.shape[2]
    return Slots(tokens, blocks, offsets, row_index(cache, blocks, offsets).reshape(-1))


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Slots,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if slots.tokens is not None:
        key, value = key[slots.tokens], value[slots.tokens]
    if k_cache.dtype == key.dtype:
        for rows, cache in ((key, k_cache), (value, v_cache)):
            flat_rows(cache).index_copy_(0, slots.rows, rows.reshape(-1, cache.shape[3]))
        return
    both = torch.stack((key, value)).float()  # [k/v, n, kv_heads, head_dim]
    scales = None  # [k/v, n or 1, kv_heads or 1]
    if k_scale is not None and v_scale is not None:
        if k_scale.dim() == 3:
            scales = _token_scales(both, k_cache.dtype)
            k_scale[slots.blocks, :, slots.offsets], v_scale[slots.blocks, :, slots.offsets] = scales
        else:
            scales = torch.stack((k_scale, v_scale))[:, None]
    for codes, cache in zip(_quantise(both, scales, k_cache.dtype), (k_cache, v_cache), strict=True):
        # As bytes: PyTorch cannot scatter float8.
        flat_rows(cache.view(torch.uint8)).index_copy_(0, slots.rows, codes.reshape(-1, cache.shape[3]))


def _token_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] for x [..., head_dim] float32; see the definition."""
    if dtype == torch.int8:
        return _range_scales(x)
    return (x.abs().nan_to_num_(nan=0.0).amax(dim=-1) / largest(dtype)).clamp_min_(SMALLEST_SCALE)


def _range_scales(x: Tensor) -> Tensor:
    x = _within(x)
    low, high = x.nan_to_num(nan=LARGEST_WITH_OFFSET).amin(dim=-1), x.nan_to_num_(nan=-LARGEST_WITH_OFFSET).amax(dim=-1)
    offsets = (low / 2 + high / 2).add_(0.0).bfloat16().float()
    reach = torch.maximum(high - offsets, offsets - low)
    scales = (reach / largest(torch.int8)).clamp_min_(SMALLEST_SCALE)
    return pack_scales((scales.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32), offsets)


def _within(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_WITH_OFFSET, LARGEST_WITH_OFFSET)


def _quantise(x: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., head_dim] float32 as bytes of `dtype`."""
    limit = largest(dtype)
    if scales is not None and scales.dtype == torch.int32:
        scales, offsets = unpack_scales(scales)
        x = _within(x).sub_(offsets[..., None])
    scaled = x.clamp(-limit, limit) if scales is None else (x / scales[..., None]).clamp_(-limit, limit)
    if not dtype.is_floating_point:
        scaled = scaled.nan_to_num_(nan=0.0).round_()
    return scaled.to(dtype).view(torch.uint8)
