"""matmul_int8 and matmul_int4 by their definition: dequantise, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.formats import SYMMETRIC_ZERO, unpack_int4


def dequantise_int8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, in]. weight: [out, in] int8.  scales: [out], or [out, in / group]."""
    groups = scales.reshape(len(scales), -1, 1).to(dtype)
    return (weight.to(dtype).view(len(scales), groups.shape[1], -1) * groups).view(weight.shape)


def dequantise_int4(
    packed: Tensor, scales: Tensor, zero_points: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """[out, in]. packed: [out, in / 2] uint8.  scales, zero_points: [out, in / group]."""
    zeros = SYMMETRIC_ZERO if zero_points is None else zero_points.to(dtype)[:, :, None]
    values = unpack_int4(packed, group).to(dtype).view(*scales.shape, group)
    return ((values - zeros) * scales.to(dtype)[:, :, None]).view(len(packed), -1)


def matmul_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x @ dequantise_int8(weight, scales, x.dtype).T


def matmul_int4(x: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    return x @ dequantise_int4(packed, scales, zero_points, group, x.dtype).T
