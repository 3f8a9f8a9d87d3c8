"""The formats of quantised tensors: what wrappers, definitions and both twins have to agree on, and nothing else.

int4 is packed two to a byte, in groups of consecutive inputs: byte j of a group holds input j in its low nibble and
input j + group / 2 in its high one. A value q stands for (q - zero point) * scale.

A KV cache of int8 with a scale for each token and head has an offset beside it: a value q stands for q * scale +
offset. Both are bfloat16, in the upper and the lower half of an int32. Other scales are float32, without offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

QUANTISED: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
)
"""The dtypes of a quantised KV cache, and the kernels' names for them."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that a row of zeros is divided by something
LARGEST_WITH_OFFSET = 127 * 2.0**121
"""What larger numbers become in an int8 cache with offsets: half a step beyond it still lies within bfloat16."""
GROUPS = (32, 64, 128)
"""How many inputs of a weight may share a scale."""
SYMMETRIC_ZERO = 8
"""The value of an int4 weight without zero points that stands for 0."""


def largest(dtype: torch.dtype) -> float:
    """The largest finite value of a quantised cache's dtype; int8 is used from -127 to 127."""
    return float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)


def scale_dtype(cache: torch.dtype, *, by_token: bool) -> torch.dtype:
    """Of the scales of a quantised cache."""
    return torch.int32 if by_token and cache == torch.int8 else torch.float32


def pack_scales(scales: Tensor, offsets: Tensor) -> Tensor:
    """int32 of float32 that hold bfloat16 numbers."""
    return scales.view(torch.int32) | offsets.view(torch.int32) >> 16 & 0xFFFF


def unpack_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """What `pack_scales` packed: scales and offsets, float32."""
    return (packed & -0x10000).view(torch.float32), (packed << 16).view(torch.float32)


def pack_int4(values: Tensor, group: int) -> Tensor:
    """[out, in / 2] uint8 of values [out, in] uint8, each 0 to 15."""
    check_group(values.shape[1], group)
    low, high = values.view(len(values), -1, 2, group // 2).unbind(dim=2)
    return (low | high << 4).view(len(values), -1)


def unpack_int4(packed: Tensor, group: int) -> Tensor:
    """What `pack_int4` packed: [out, in] uint8."""
    check_group(2 * packed.shape[1], group)
    halves = packed.view(len(packed), -1, group // 2)
    return torch.stack((halves & 15, halves >> 4), dim=2).view(len(packed), -1)


def check_group(in_features: int, group: int) -> None:
    """Raises ValueError where a weight of so many inputs has no such groups."""
    if group not in GROUPS or in_features % group:
        raise ValueError(f"group: got {group} for {in_features} inputs; allowed: 32, 64 or 128, which divides them")
