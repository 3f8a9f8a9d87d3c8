"""Keys and values as a paged cache holds them, and how they are read on the CPU: gathered, widened, scaled, an offset
added where there is one.

What is read is the number that the format stands for, in the dtype that is computed with. float8 is widened bit by bit,
since PyTorch converts it element by element where the processor has no AVX-512.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nereid_kernels.cpu.layout import flat_rows
from nereid_kernels.formats import unpack_scales

# e4m3's exponent and mantissa placed in float16 read as 2**-8 of the value: the biases are 7 and 15.
_E4M3_IN_FLOAT16 = 2.0**8


@dataclass(frozen=True, slots=True)
class Stored:
    """A layer's keys or values. cache: [block, kv_head, slot, head_dim].  scale: what they are multiplied by, [1],
    [kv_heads] or [block, kv_head, slot], int32 of the latter with an offset (see formats); None where they are stored
    as they are computed with."""

    cache: Tensor
    scale: Tensor | None


def read(stored: Stored, rows: Tensor, scale_rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of the cache in `dtype`, [n, kv_heads, c, head_dim].

    rows: [n, kv_heads, c], of `flat_rows(cache)`.  scale_rows: likewise of a scale that there is for each token.
    """
    cache, scale = stored.cache, stored.scale
    if scale is None:
        return functional.embedding(rows, flat_rows(cache))  # torch's parallel gather of rows
    # As int8, which PyTorch can gather and widens with its sign.
    codes = functional.embedding(rows, flat_rows(cache.view(torch.int8)))
    factors = scale.view(-1, 1, 1) if scale_rows is None or scale.dim() == 1 else _gather(scale, scale_rows)
    if factors.dtype == torch.int32:
        factors, offsets = unpack_scales(factors)
        return _widen(codes, cache.dtype).mul_(factors).add_(offsets).to(dtype)
    if cache.dtype == torch.float8_e4m3fn:
        factors = factors * _E4M3_IN_FLOAT16
    return _widen(codes, cache.dtype).mul_(factors).to(dtype)


def _gather(scale: Tensor, rows: Tensor) -> Tensor:
    """[n, kv_heads, c, 1]"""
    return flat_rows(scale[..., None]).view(-1)[rows][..., None]


def _widen(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers for which codes of `dtype` stand, in float32; those of e4m3 times 2**-8. A NaN stays one."""
    if dtype == torch.int8:
        return codes.float()
    bits = codes.to(torch.int16)
    if dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).float()
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    # All ones is e4m3's NaN: that alone carries into the highest bit of float16's exponent, and with it is a NaN there.
    bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))
    return bits.view(torch.float16).float()
