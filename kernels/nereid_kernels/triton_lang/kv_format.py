"""How the elements of a KV cache are widened in a kernel: the cache's dtype by name, the conversion, and what int8 with
a scale for each token packs: see formats.

A float8 cache is read as bytes and widened by hand, which every architecture can, and which is exact: the bits of both
formats lie within those of float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.formats import QUANTISED


def format_of(dtype: torch.dtype) -> str:
    """The name by which `widen` knows a cache's dtype; "plain" where it is stored as it is computed with."""
    return QUANTISED.get(dtype, "plain")


def as_bits(cache: Tensor) -> Tensor:
    """A float8 tensor as its bytes; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 and cache.is_floating_point() else cache


def scales_of(scale: Tensor | None) -> str:
    """The form of a scale as the kernels know it: none, or one a tensor, a KV head, a token."""
    if scale is None:
        return "none"
    return "token" if scale.dim() == 3 else "head" if scale.numel() > 1 else "tensor"


@triton.jit
def pack_scales(scale: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """int32 of float32 that hold bfloat16 numbers."""
    return scale.to(tl.int32, bitcast=True) | ((offset.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@triton.jit
def scale_in(packed: tl.tensor) -> tl.tensor:
    return (packed & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def offset_in(packed: tl.tensor) -> tl.tensor:
    return (packed << 16).to(tl.float32, bitcast=True)


@triton.jit
def widen(x: tl.tensor, FORMAT: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """A tile of the cache in the dtype that is computed with."""
    if FORMAT == "e4m3":
        # Exponent and mantissa of e4m3 placed in float16 read as 2**-8 of the value: the biases are 7 and 15.
        magnitude = (x & 0x7F).to(tl.uint16)
        bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7).to(tl.uint16)  # all ones is a NaN
        bits = bits | ((x & 0x80).to(tl.uint16) << 8)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    elif FORMAT == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif FORMAT == "int8":
        return x.to(tl.float32).to(dtype)
    else:
        return x
