"""matmul_int8 and matmul_int4 on the CPU: the weight is dequantised to x's dtype, then multiplied batch invariantly."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.cpu.matmul import matmul
from nereid_kernels.reference.quantised_matmul import dequantise_int4, dequantise_int8


def matmul_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x: [rows, in].  weight: [out, in] int8.  scales: [out], or [out, in / group]."""
    return matmul(x, dequantise_int8(weight, scales, torch.float32).to(x.dtype), None)


def matmul_int4(x: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    """x: [rows, in].  packed: [out, in / 2] uint8.  scales, zero_points: [out, in / group]."""
    return matmul(x, dequantise_int4(packed, scales, zero_points, group, torch.float32).to(x.dtype), None)
