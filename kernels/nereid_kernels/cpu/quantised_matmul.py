"""matmul_int8 and matmul_int4 on the CPU: the weight is dequantised to x's dtype, then multiplied batch invariantly."""

from __future__ import annotations

from torch import Tensor

from nereid_kernels.cpu.matmul import matmul
from nereid_kernels.formats import SYMMETRIC_ZERO, unpack_int4


def matmul_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x: [rows, in].  weight: [out, in] int8.  scales: [out], or [out, in / group]."""
    by_group = scales.float().view(len(scales), -1, 1)
    values = weight.float().view(len(weight), by_group.shape[1], -1).mul_(by_group)
    return matmul(x, values.view(weight.shape).to(x.dtype), None)


def matmul_int4(x: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    """x: [rows, in].  packed: [out, in / 2] uint8.  scales, zero_points: [out, in / group]."""
    values = unpack_int4(packed, group).float().view(*scales.shape, group)
    values -= SYMMETRIC_ZERO if zero_points is None else zero_points[:, :, None]
    values *= scales.float()[:, :, None]
    return matmul(x, values.view(len(packed), -1).to(x.dtype), None)
