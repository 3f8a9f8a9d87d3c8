"""rms_norm on the CPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    if weight_offset == 0.0:
        return functional.rms_norm(x, weight.shape, weight, eps)
    normed = functional.rms_norm(x.float(), weight.shape, weight.float() + weight_offset, eps)
    return normed.to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset), total
