"""The kernel of matmul: one program a tile [BLOCK_M rows, BLOCK_N output features], which runs over all of `in` itself.

Always holds: a row's result does not depend on the number of rows nor on its place among them. The tiles come from
dtype, architecture and output features, never from the rows; the sum over `in` is never split between programs; and
`rows` is not specialised (Triton-lang would compile anew for 1 and for multiples of 16), so all numbers of rows run
the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose


@triton.jit
def tile_of(
    program: tl.tensor, rows: tl.tensor, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(row tile, feature tile) of a program. GROUP_M row tiles take a feature tile one after the other, so that what
    runs at the same time shares rows and weights in the L2 cache."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    group_size = GROUP_M * tl.cdiv(OUT, BLOCK_N)
    first = program // group_size * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    within = program % group_size
    return first + within % height, within // height


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x_ptr: tl.tensor,  # [rows, IN]
    weight_ptr: tl.tensor,  # [OUT, IN], contiguous
    bias_ptr: tl.tensor,  # [OUT], or None
    out_ptr: tl.tensor,  # [rows, OUT], contiguous
    rows: tl.tensor,
    x_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    row_tile, feature_tile = tile_of(tl.program_id(0), rows, OUT, BLOCK_M, BLOCK_N, GROUP_M)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = feature_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, feature_mask = row < rows, feature < OUT
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]  # [BLOCK_M, BLOCK_K]
    weight_ptrs = weight_ptr + feature.to(tl.int64)[None, :] * IN + k[:, None]  # [BLOCK_K, BLOCK_N]

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, IN, BLOCK_K):
        x_mask, weight_mask = row_mask[:, None], feature_mask[None, :]
        if IN % BLOCK_K != 0:
            k_mask = start + k < IN
            x_mask, weight_mask = x_mask & k_mask[None, :], weight_mask & k_mask[:, None]
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")

    if bias_ptr is not None:
        total += tl.load(bias_ptr + feature, mask=feature_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * OUT + feature[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & feature_mask[None, :])


def launch_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, architecture: str | None = None
) -> Launch:
    """x: [rows, in].  weight: [out, in].  bias: [out].  out: [rows, out].  architecture: as in `launch_rms_norm`."""
    (rows, in_features), out_features = x.shape, weight.shape[0]
    architecture = architecture or architecture_of(x.device)
    config = choose("matmul", architecture, itemsize=x.element_size(), size=out_features)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "out_ptr": out,
        "rows": rows,
        "x_stride": x.stride(0),
        "OUT": out_features,
        "IN": in_features,
        **config.tiles,
    }
    grid = (triton.cdiv(rows, config.tiles["BLOCK_M"]) * triton.cdiv(out_features, config.tiles["BLOCK_N"]),)
    return Launch(_matmul, grid, arguments, config.num_warps, config.num_stages)
