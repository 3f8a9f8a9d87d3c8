"""The kernel of rms_norm and add_rms_norm: one program a row, which is read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose


@triton.jit
def _rms_norm(
    x_ptr: tl.tensor,  # [rows, width]
    residual_ptr: tl.tensor,  # [rows, width], or None
    weight_ptr: tl.tensor,  # [width]
    out_ptr: tl.tensor,  # [rows, width], contiguous
    total_ptr: tl.tensor,  # [rows, width], contiguous, or None
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    weight_offset: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if residual_ptr is not None:
        x = x + tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        tl.store(total_ptr + row * WIDTH + columns, x, mask=mask)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
    mean_square = tl.sum(x * x, axis=0) / WIDTH
    y = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(out_ptr + row * WIDTH + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    weight_offset: float,
    architecture: str | None = None,
) -> Launch:
    """x, residual, out, total: [rows, width].  architecture: x's device's own, unless it is compiled for another."""
    rows, width = x.shape
    config = choose("rms_norm", architecture or architecture_of(x.device), itemsize=x.element_size(), size=width)
    arguments = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "out_ptr": out,
        "total_ptr": total,
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "eps": eps,
        "weight_offset": weight_offset,
        "WIDTH": width,
        "BLOCK": triton.next_power_of_2(width),
    }
    return Launch(_rms_norm, (rows,), arguments, config.num_warps, config.num_stages)
