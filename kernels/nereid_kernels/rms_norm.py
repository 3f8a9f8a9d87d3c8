"""rms_norm: root-mean-square norm over the last dimension (Zhang and Sennrich 2019), with or without a residual sum.

y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight); weight_offset 1 is Gemma's form. With a residual, x + residual
is normed and returned as well: one pass over memory instead of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import rms_norm as cpu
from nereid_kernels.launch import run


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, backend: str = "auto") -> Tensor:
    """[rows, width] of x's dtype, computed in float32.

    x: [rows, width] float16, bfloat16 or float32; rows may be strided.  weight: [width] of a float dtype.
    eps: added to the mean square.  Raises ValueError or TypeError, which name the argument.
    """
    device = _check(x, weight)
    if pick(device, backend) == "cpu":
        return cpu.rms_norm(x, weight, eps, weight_offset)
    out: Tensor = _rms_norm(x, weight, eps, weight_offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), each [rows, width]; the sum is rounded to x's dtype before it is normed.

    residual: [rows, width] of x's dtype; for the rest see `rms_norm`.
    """
    device = _check(x, weight)
    check_shapes({}, residual=(residual, tuple(x.shape)))
    check_dtypes((x.dtype,), residual=residual)
    check_same_device(x=x, residual=residual)
    check_contiguous_rows(residual=residual)
    if pick(device, backend) == "cpu":
        return cpu.add_rms_norm(x, residual, weight, eps, weight_offset)
    both: tuple[Tensor, Tensor] = _add_rms_norm(x, residual, weight, eps, weight_offset)
    return both


def _check(x: Tensor, weight: Tensor) -> torch.device:
    check_shapes({}, x=(x, ("rows", "width")), weight=(weight, (x.shape[-1],)))
    check_dtypes(FLOATS, x=x, weight=weight)
    check_contiguous_rows(x=x, weight=weight)
    return check_same_device(x=x, weight=weight)


@torch.library.custom_op("nereid_kernels::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    from nereid_kernels.triton_lang.rms_norm import launch_rms_norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(launch_rms_norm(x, None, weight, out, None, eps, weight_offset))
    return out


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("nereid_kernels::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    from nereid_kernels.triton_lang.rms_norm import launch_rms_norm

    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    run(launch_rms_norm(x, residual, weight, out, total, eps, weight_offset))
    return out, total


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device)
