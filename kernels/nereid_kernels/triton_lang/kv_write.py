"""The kernel of kv_write: one program for a token and a group of its KV heads. Quantising is here for others too.

float8 is made by hand, bit by bit, since sm_80 has no instruction for it: integer arithmetic, exact, the same bits on
every architecture.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.formats import LARGEST_WITH_OFFSET, SMALLEST_SCALE, largest
from nereid_kernels.launch import Launch, architecture_of, choose
from nereid_kernels.triton_lang.kv_format import as_bits, format_of, offset_in, pack_scales, scale_in, scales_of

_LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)
_LARGEST_WITH_OFFSET = tl.constexpr(LARGEST_WITH_OFFSET)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_INT8_ADDEND = tl.constexpr(12582912.0)  # 1.5 * 2**23: float32 numbers about it are 1 apart
_INT8_ADDEND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def absmax_scale(x: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """The scale of each row of x, [rows, columns] float32: see reference.kv_write."""
    magnitude = tl.where(x == x, tl.minimum(tl.abs(x), _LARGEST_FLOAT32), 0.0)
    return tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), LIMIT), _SMALLEST_SCALE)


@triton.jit
def within(x: tl.tensor) -> tl.tensor:
    """What int8 with an offset holds of x; a NaN may become any number."""
    return tl.minimum(tl.maximum(x, -_LARGEST_WITH_OFFSET), _LARGEST_WITH_OFFSET)


@triton.jit
def range_scale(x: tl.tensor, mask: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """The scale of each row of x, [rows, columns] float32, with its offset: see reference.kv_write."""
    counts = mask & (x == x)
    low = tl.min(tl.where(counts, within(x), _LARGEST_WITH_OFFSET), axis=1)
    high = tl.max(tl.where(counts, within(x), -_LARGEST_WITH_OFFSET), axis=1)
    middle = (low * 0.5 + high * 0.5 + 0.0).to(tl.int32, bitcast=True)  # a zero without a sign
    offset = ((middle + 0x7FFF + ((middle >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    reach = tl.maximum(high - offset, offset - low)
    scale = tl.maximum(tl.div_rn(reach, LIMIT), _SMALLEST_SCALE).to(tl.int32, bitcast=True)
    return pack_scales(((scale + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True), offset)


@triton.jit
def narrow(x: tl.tensor, FORMAT: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """float32 -> int8, or a float8's bits as uint8: to nearest even, saturating at LIMIT. NaN stays NaN, or is 0."""
    if FORMAT == "int8":
        finite = tl.where(x == x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT), 0.0)
        return ((finite + _INT8_ADDEND).to(tl.int32, bitcast=True) - _INT8_ADDEND_BITS).to(tl.int8)
    else:
        MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2  # bits
        SMALLEST: tl.constexpr = -6 if FORMAT == "e4m3" else -14  # exponent of a normal number
        DROPPED: tl.constexpr = 23 - MANTISSA
        magnitude = tl.minimum(tl.abs(x), LIMIT)
        bits = magnitude.to(tl.int32, bitcast=True)
        # Half of the last bit that is kept, less one where that bit is even: a tie is carried to the even neighbour.
        rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
        normal = rounded - ((126 + SMALLEST) << MANTISSA)
        # Below the normal numbers the float8 are equally far apart. Added to a number whose neighbours are as far
        # apart, x is rounded to them by the addition, and the low bits of the sum count the steps.
        ADDEND: tl.constexpr = 2.0 ** (23 + SMALLEST - MANTISSA)
        ADDEND_BITS: tl.constexpr = (127 + 23 + SMALLEST - MANTISSA) << 23
        subnormal = (magnitude + ADDEND).to(tl.int32, bitcast=True) - ADDEND_BITS
        unsigned = tl.where(magnitude < 2.0**SMALLEST, subnormal, normal)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (tl.where(x == x, unsigned, 0x7F) | sign).to(tl.uint8)


@triton.jit
def store_heads(
    x: tl.tensor,  # [heads, head_dim]: a token's keys or values
    cache_ptrs: tl.tensor,  # [heads, head_dim]
    scale_ptrs: tl.tensor,  # [heads], or None
    head_mask: tl.tensor,  # [heads]
    mask: tl.tensor,  # [heads, head_dim]; x is 0 outside it
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Quantise x where the cache is quantised, and store it. SCALES "token": the scale is computed, and stored too."""
    if FORMAT == "plain":
        tl.store(cache_ptrs, x.to(cache_ptrs.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        if SCALES == "token" and FORMAT == "int8":
            packed = range_scale(x, mask, LIMIT)
            tl.store(scale_ptrs, packed, mask=head_mask)
            moved = within(x) - offset_in(packed)[:, None]
            x = tl.where(x == x, tl.div_rn(moved, scale_in(packed)[:, None]), 0.0)
        elif SCALES == "token":
            scale = absmax_scale(x, LIMIT)
            tl.store(scale_ptrs, scale, mask=head_mask)
            x = tl.div_rn(x, scale[:, None])
        elif SCALES != "none":
            x = tl.div_rn(x, tl.load(scale_ptrs, mask=head_mask, other=1.0)[:, None])
        tl.store(cache_ptrs, narrow(x, FORMAT, LIMIT), mask=mask)


@triton.jit
def _kv_write(
    key_ptr: tl.tensor,  # [tokens, KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # as key_ptr
    k_cache_ptr: tl.tensor,  # [block, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache_ptr: tl.tensor,  # as k_cache_ptr
    slot_mapping_ptr: tl.tensor,  # [tokens]
    k_scale_ptr: tl.tensor,  # [1], [KV_HEADS] or [block, KV_HEADS, BLOCK_SIZE], or None; absent axes have stride 0
    v_scale_ptr: tl.tensor,  # as k_scale_ptr
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    cache_block_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    cache_slot_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)  # int64, and so is what follows from it
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    head_mask = heads < KV_HEADS
    mask = head_mask[:, None] & (columns < HEAD_DIM)

    key_ptrs = key_ptr + token * key_stride + heads[:, None] * key_head_stride + columns
    value_ptrs = value_ptr + token * value_stride + heads[:, None] * value_head_stride + columns
    key = tl.load(key_ptrs, mask=mask, other=0.0)
    value = tl.load(value_ptrs, mask=mask, other=0.0)
    at = block * cache_block_stride + offset * cache_slot_stride + heads[:, None] * cache_head_stride + columns
    scale_at = block * scale_block_stride + offset * scale_slot_stride + heads * scale_head_stride
    k_scale_ptrs = None if SCALES == "none" else k_scale_ptr + scale_at
    v_scale_ptrs = None if SCALES == "none" else v_scale_ptr + scale_at
    store_heads(key, k_cache_ptr + at, k_scale_ptrs, head_mask, mask, FORMAT, SCALES, LIMIT)
    store_heads(value, v_cache_ptr + at, v_scale_ptrs, head_mask, mask, FORMAT, SCALES, LIMIT)


def cache_arguments(
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> dict[str, Any]:
    """What a kernel that stores in the cache has to know of it, by the names of its parameters."""
    cache_format = format_of(k_cache.dtype)
    block_stride, head_stride, slot_stride, _ = k_cache.stride()
    scale_strides = _scale_strides(k_scale)
    return {
        "k_cache_ptr": as_bits(k_cache),
        "v_cache_ptr": as_bits(v_cache),
        "slot_mapping_ptr": slot_mapping,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "cache_block_stride": block_stride,
        "cache_head_stride": head_stride,
        "cache_slot_stride": slot_stride,
        "scale_block_stride": scale_strides[0],
        "scale_head_stride": scale_strides[1],
        "scale_slot_stride": scale_strides[2],
        "KV_HEADS": k_cache.shape[1],
        "HEAD_DIM": k_cache.shape[3],
        "BLOCK_SIZE": k_cache.shape[2],
        "BLOCK_DIM": triton.next_power_of_2(k_cache.shape[3]),
        "FORMAT": cache_format,
        "SCALES": scales_of(k_scale),
        "LIMIT": 0.0 if cache_format == "plain" else largest(k_cache.dtype),
    }


def _scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    """Over (block, kv_head, slot); 0 where the scale has no such axis."""
    if scale is None or scale.numel() == 1:
        return 0, 0, 0
    return scale.stride() if scale.dim() == 3 else (0, scale.stride(0), 0)


def launch_kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    architecture: str | None = None,
) -> Launch:
    """For the tensors see `nereid_kernels.kv_write`.

    architecture: key's device's own, unless it is compiled for another.
    """
    tokens, kv_heads, _ = key.shape
    config = choose("kv_write", architecture or architecture_of(key.device), itemsize=key.element_size())
    block_heads = min(config.tiles["BLOCK_HEADS"], triton.next_power_of_2(kv_heads))
    arguments = {
        "key_ptr": key,
        "value_ptr": value,
        "key_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        **cache_arguments(k_cache, v_cache, slot_mapping, k_scale, v_scale),
        "BLOCK_HEADS": block_heads,
    }
    grid = (tokens, triton.cdiv(kv_heads, block_heads))
    return Launch(_kv_write, grid, arguments, config.num_warps, config.num_stages)
