"""kv_write on the CPU. Always holds: a quantised cache gets the very bits that the definition gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_kernels.cpu.layout import flat_rows, row_index
from nereid_kernels.formats import SMALLEST_SCALE, largest


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
    for new, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        kept = new if slots.tokens is None else new[slots.tokens]
        if cache.dtype == new.dtype:
            flat_rows(cache).index_copy_(0, slots.rows, kept.reshape(-1, cache.shape[3]))
        else:
            _quantise_into(kept, cache, slots, scale)


def _quantise_into(rows: Tensor, cache: Tensor, slots: Slots, scale: Tensor | None) -> None:
    """rows: [n, kv_heads, head_dim]."""
    scaled, limit = rows.float(), largest(cache.dtype)
    if scale is not None and scale.dim() == 3:
        magnitudes = scaled.abs().nan_to_num_(nan=0.0)  # a NaN counts for nothing, an infinity as the largest float32
        new = (magnitudes.amax(dim=-1) / limit).clamp_min_(SMALLEST_SCALE)  # [n, kv_heads]
        scale[slots.blocks, :, slots.offsets] = new
        scale = new
    if scale is not None:
        scaled = scaled / scale[..., None]
    scaled = scaled.clamp(-limit, limit)
    if not cache.is_floating_point():
        scaled = scaled.nan_to_num_(nan=0.0).round_()
    # As bytes: PyTorch cannot scatter float8.
    cache.view(torch.uint8)[slots.blocks, :, slots.offsets] = scaled.to(cache.dtype).view(torch.uint8)
