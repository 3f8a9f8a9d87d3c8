"""matmul_int8 and matmul_int4: products with a weight of 8 or 4 bits, dequantised in registers; and how to make one.

Activations stay as they are (weight-only quantisation: LLM.int8's per-channel scales, Dettmers et al. 2022; groups as
in GPTQ, Frantar et al. 2022, and AWQ, Lin et al. 2023). Batch invariant as matmul is; sums are kept in float32.

How int4 is packed says `nereid_kernels.formats`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import quantised_matmul as cpu
from nereid_kernels.formats import GROUPS, SYMMETRIC_ZERO, check_group, pack_int4
from nereid_kernels.launch import run

_TINY = torch.finfo(torch.float32).tiny


def quantise_int8(weight: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """(weight int8, scales float32) of a float weight [out, in]: symmetric, to nearest, scale = max |w| / 127.

    scales: [out], or [out, in / group].  The error of an element is at most half its scale, but for float32 rounding.
    """
    if group is not None:
        check_group(weight.shape[1], group)
    groups = weight.float().reshape(len(weight), -1 if group is not None else 1, group or weight.shape[1])
    scales = _scales(groups.abs().amax(dim=2) / 127) if groups.numel() else groups.new_ones(groups.shape[:2])
    quantised = (groups / scales[:, :, None]).round().clamp(-127, 127).to(torch.int8)
    return quantised.view(weight.shape), scales if group is not None else scales[:, 0]


def quantise_int4(weight: Tensor, group: int, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """(packed [out, in / 2] uint8, scales [out, in / group] float32, zero points of that shape uint8 or None).

    weight: [out, in] of a float dtype.  symmetric: scale = max |w| / 7 and no zero points; otherwise
    scale = (max - min) / 15 over the group's values and 0.  The error of an element is at most half its scale where
    symmetric, one scale otherwise (both the value and the zero point are rounded), but for float32 rounding.
    """
    check_group(weight.shape[1], group)
    groups = weight.float().reshape(len(weight), -1, group)
    if symmetric:
        scales = _scales(groups.abs().amax(dim=2) / 7)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = _scales((high - low) / 15)
        zeros = (-low / scales).round().clamp(0, 15)
    values = ((groups / scales[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15).to(torch.uint8)
    return pack_int4(values.view(weight.shape), group), scales, None if symmetric else zeros.to(torch.uint8)


def matmul_int8(x: Tensor, weight: Tensor, scales: Tensor, *, backend: str = "auto") -> Tensor:
    """x @ (weight * scales).T, [rows, out] of x's dtype.

    x: [rows, in] float16, bfloat16 or float32; rows may be strided.  weight: [out, in] int8, contiguous.
    scales: [out] or [out, in / group] of a float dtype, contiguous; group 32, 64, 128 or in.
    Raises ValueError or TypeError, which name the argument.
    """
    sizes = _check(x, weight=weight, scales=scales)
    check_shapes(sizes, weight=(weight, ("out", "in")))
    check_dtypes((torch.int8,), weight=weight)
    groups = 1 if scales.dim() == 1 else scales.shape[-1]
    check_shapes(sizes, scales=(scales, ("out",) if scales.dim() == 1 else ("out", groups)))
    if groups != 1 and groups not in [sizes["in"] // group for group in GROUPS if sizes["in"] % group == 0]:
        raise ValueError(f"scales: got {groups} groups of {sizes['in']} inputs; allowed: groups of 32, 64, 128, or one")
    if pick(x.device, backend) == "cpu":
        return cpu.matmul_int8(x, weight, scales)
    out: Tensor = _matmul_int8(x, weight, scales)
    return out


def matmul_int4(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    group: int,
    backend: str = "auto",
) -> Tensor:
    """x @ ((values - zero_points) * scales).T, [rows, out] of x's dtype.

    x: [rows, in] float16, bfloat16 or float32; rows may be strided.  packed: [out, in / 2] uint8, contiguous, as
    `formats.pack_int4` packs.  scales: [out, in / group] of a float dtype, contiguous.  zero_points: uint8, as scales.
    group: 32, 64 or 128; divides in.  Raises ValueError or TypeError, which name the argument.
    """
    zeros = {} if zero_points is None else {"zero_points": zero_points}
    sizes = _check(x, packed=packed, scales=scales, **zeros)
    check_group(sizes["in"], group)
    check_shapes(sizes, packed=(packed, ("out", sizes["in"] // 2)))
    for name, tensor in {"scales": scales, **zeros}.items():
        check_shapes(sizes, **{name: (tensor, ("out", sizes["in"] // group))})
    check_dtypes((torch.uint8,), packed=packed, **zeros)
    if pick(x.device, backend) == "cpu":
        return cpu.matmul_int4(x, packed, scales, zero_points, group)
    out: Tensor = _matmul_int4(x, packed, scales, zero_points, group)
    return out


def _scales(wanted: Tensor) -> Tensor:
    """A group of zeros gets the scale 1; none is so small that it is no normal number."""
    return torch.where(wanted > 0, wanted.clamp(min=_TINY), 1.0)


def _check(x: Tensor, **weights: Tensor) -> dict[str, int]:
    sizes: dict[str, int] = {}
    check_shapes(sizes, x=(x, ("rows", "in")))
    check_dtypes(FLOATS, x=x, scales=weights["scales"])
    check_contiguous_rows(x=x)
    for name, tensor in weights.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: got strides {tensor.stride()}; allowed: contiguous")
    check_same_device(x=x, **weights)
    return sizes


@torch.library.custom_op("nereid_kernels::matmul_int8", mutates_args=())
def _matmul_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    from nereid_kernels.triton_lang.quantised_matmul import launch_matmul_int8

    out = _empty(x, weight)
    run(launch_matmul_int8(x, weight, scales, out))
    return out


@_matmul_int8.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return _empty(x, weight)


@torch.library.custom_op("nereid_kernels::matmul_int4", mutates_args=())
def _matmul_int4(x: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    from nereid_kernels.triton_lang.quantised_matmul import launch_matmul_int4

    out = _empty(x, packed)
    run(launch_matmul_int4(x, packed, scales, zero_points, out, group))
    return out


@_matmul_int4.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor | None, group: int) -> Tensor:
    return _empty(x, packed)


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
