"""The kernels of matmul_int8 and matmul_int4. Tiles as in matmul: fixed, whatever the number of rows.

The product is computed transposed, weight x x^T: what has to be converted in registers is then the left operand, which
a warp-group product (sm_90) may take from registers, and few rows make a narrow tile rather than an empty one.
The integers are exact in x's dtype; scales multiply the float32 sum over a group, or over a whole output feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose
from nereid_kernels.triton_lang.matmul import tile_of


@triton.jit
def _store(
    total: tl.tensor, out_ptr: tl.tensor, row: tl.tensor, feature: tl.tensor, rows: tl.tensor, OUT: tl.constexpr
) -> None:
    """total: [BLOCK_N, BLOCK_M], transposed.  out_ptr: [rows, OUT], contiguous."""
    out_ptrs = out_ptr + row.to(tl.int64)[None, :] * OUT + feature[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :] & (feature < OUT)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _matmul_int8(
    x_ptr: tl.tensor,  # [rows, IN]
    weight_ptr: tl.tensor,  # [OUT, IN] int8, contiguous
    scales_ptr: tl.tensor,  # [OUT, NUM_GROUPS], contiguous
    out_ptr: tl.tensor,  # [rows, OUT], contiguous
    rows: tl.tensor,
    x_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides IN / NUM_GROUPS, where there is more than one group
    GROUP_M: tl.constexpr,
) -> None:
    row_tile, feature_tile = tile_of(tl.program_id(0), rows, OUT, BLOCK_M, BLOCK_N, GROUP_M)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = feature_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, feature_mask = row < rows, feature < OUT
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * x_stride + k[:, None]  # [BLOCK_K, BLOCK_M]
    weight_ptrs = weight_ptr + feature.to(tl.int64)[:, None] * IN + k[None, :]  # [BLOCK_N, BLOCK_K]
    scale_ptrs = scales_ptr + feature * NUM_GROUPS

    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, IN, BLOCK_K):
        x_mask, weight_mask = row_mask[None, :], feature_mask[:, None]
        if IN % BLOCK_K != 0:
            k_mask = start + k < IN
            x_mask, weight_mask = x_mask & k_mask[:, None], weight_mask & k_mask[None, :]
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0).to(x.dtype)
        if NUM_GROUPS == 1:
            total = tl.dot(weight, x, total, input_precision="ieee")
        else:
            scale = tl.load(scale_ptrs + start // (IN // NUM_GROUPS), mask=feature_mask, other=0.0).to(tl.float32)
            total += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
    if NUM_GROUPS == 1:
        total *= tl.load(scale_ptrs, mask=feature_mask, other=0.0).to(tl.float32)[:, None]
    _store(total, out_ptr, row, feature, rows, OUT)


@triton.jit(do_not_specialize=["rows"])
def _matmul_int4(
    x_ptr: tl.tensor,  # [rows, IN]
    packed_ptr: tl.tensor,  # [OUT, IN / 2] uint8, contiguous
    scales_ptr: tl.tensor,  # [OUT, IN / GROUP], contiguous
    zero_points_ptr: tl.tensor,  # [OUT, IN / GROUP] uint8, contiguous; or None: all are 8
    out_ptr: tl.tensor,  # [rows, OUT], contiguous
    rows: tl.tensor,
    x_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    row_tile, feature_tile = tile_of(tl.program_id(0), rows, OUT, BLOCK_M, BLOCK_N, GROUP_M)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = feature_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, feature_mask = row < rows, feature < OUT
    HALF: tl.constexpr = GROUP // 2  # the low nibbles of a group's bytes are its first half, the high ones its second
    j = tl.arange(0, HALF)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * x_stride + j[:, None]  # [HALF, BLOCK_M]
    packed_ptrs = packed_ptr + feature.to(tl.int64)[:, None] * (IN // 2) + j[None, :]  # [BLOCK_N, HALF]

    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(IN // GROUP):
        first = tl.load(x_ptrs + group * GROUP, mask=row_mask[None, :], other=0.0)
        second = tl.load(x_ptrs + group * GROUP + HALF, mask=row_mask[None, :], other=0.0)
        packed = tl.load(packed_ptrs + group * HALF, mask=feature_mask[:, None], other=0)
        at = feature * (IN // GROUP) + group
        scale = tl.load(scales_ptr + at, mask=feature_mask, other=0.0).to(tl.float32)
        low, high = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
        if zero_points_ptr is None:
            low, high = low - 8, high - 8
        else:
            zero = tl.load(zero_points_ptr + at, mask=feature_mask, other=0).to(tl.int8)
            low, high = low - zero[:, None], high - zero[:, None]
        part = tl.dot(low.to(first.dtype), first, input_precision="ieee")
        part = tl.dot(high.to(second.dtype), second, part, input_precision="ieee")
        total += part * scale[:, None]
    _store(total, out_ptr, row, feature, rows, OUT)


def launch_matmul_int8(
    x: Tensor, weight: Tensor, scales: Tensor, out: Tensor, architecture: str | None = None
) -> Launch:
    """x: [rows, in].  weight: [out, in] int8.  scales: [out], or [out, in / group].  out: [rows, out]."""
    num_groups = 1 if scales.dim() == 1 else scales.shape[1]
    launch = _launch(_matmul_int8, x, out, architecture, weight_ptr=weight, scales_ptr=scales, NUM_GROUPS=num_groups)
    if num_groups == 1:
        return launch
    block_k = min(launch.arguments["BLOCK_K"], x.shape[1] // num_groups)
    return replace(launch, arguments={**launch.arguments, "BLOCK_K": block_k})


def launch_matmul_int4(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    out: Tensor,
    group: int,
    architecture: str | None = None,
) -> Launch:
    """x: [rows, in].  packed: [out, in / 2].  scales, zero_points: [out, in / group].  out: [rows, out]."""
    weight = {"packed_ptr": packed, "scales_ptr": scales, "zero_points_ptr": zero_points}
    return _launch(_matmul_int4, x, out, architecture, **weight, GROUP=group)


def _launch(kernel: Any, x: Tensor, out: Tensor, architecture: str | None, **weight: Any) -> Launch:
    rows, out_features = out.shape
    name = str(kernel.fn.__name__).lstrip("_")
    architecture = architecture or architecture_of(x.device)
    config = choose(name, architecture, itemsize=x.element_size(), size=out_features)
    arguments = {
        "x_ptr": x,
        "out_ptr": out,
        "rows": rows,
        "x_stride": x.stride(0),
        "OUT": out_features,
        "IN": x.shape[1],
        **weight,
        **config.tiles,
    }
    grid = (triton.cdiv(rows, config.tiles["BLOCK_M"]) * triton.cdiv(out_features, config.tiles["BLOCK_N"]),)
    return Launch(kernel, grid, arguments, config.num_warps, config.num_stages)
