"""matmul by its definition."""

from __future__ import annotations

from torch import Tensor


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, in].  weight: [out, in].  bias: [out]."""
    out = x @ weight.T
    return out if bias is None else out + bias
