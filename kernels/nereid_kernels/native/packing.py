"""Weights in the order in which the native products read them: tile after tile, each in one piece.

A tile is `tile` output features: [in][tile] float32, or [in / 2][tile][2] bfloat16, or codes of 8 or 4 bits; the last
one is filled up with zeros. What is gated has, in each tile, half of it gates and half what they gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nereid_kernels.formats import pack_scales
from nereid_kernels.native.quantising import quantise

REVISION = 2
"""Raise it when other bits come of the same quantised weights, or in another order: stored ones are then void."""

Place = Callable[[Tensor], Tensor]
"""Makes a contiguous copy where packed weights are to lie."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """data: [tiles, in / unit, tile, unit].  out_features, in_features: of the weight, without what fills it up."""

    data: Tensor
    out_features: int
    in_features: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A scale for each output feature and `group` inputs; the last group may be smaller.

    codes: [tiles, in, tile] int8 of 8 bits, or [tiles, in / 2, tile] uint8 of 4, the even input in the lower half and 8
    standing for 0.  scales: [tiles, groups, tile]: float32 of 8 bits; of 4, int32 with a scale's bfloat16 in the upper
    half and an offset's in the lower.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int
    out_features: int
    in_features: int
    gated: bool = False


def pack(weight: Tensor, tile: int, place: Place = Tensor.contiguous) -> PackedWeight:
    """weight: [out, in] float32, or bfloat16 with an even `in`."""
    return PackedWeight(place(_tiles(_filled(weight, tile), tile)), *weight.shape)


def pack_gated(gate: Tensor, up: Tensor, tile: int, place: Place = Tensor.contiguous) -> PackedWeight:
    """gate, up: [out, in] each. out_features are those of both."""
    data = place(_tiles(_interleaved(gate, up, tile), tile))
    return PackedWeight(data, 2 * gate.shape[0], gate.shape[1], gated=True)


def pack_quantised(
    weight: Tensor, tile: int, bits: int, group: int, place: Place = Tensor.contiguous
) -> QuantisedWeight:
    """weight: [out, in] of a float dtype, with an even `in`.  bits: 8 or 4.  group: even."""
    codes, scales = map(place, _quantised_tiles(_filled(weight, tile), tile, bits, group))
    return QuantisedWeight(codes, scales, bits, group, *weight.shape)


def pack_quantised_gated(
    gate: Tensor, up: Tensor, tile: int, bits: int, group: int, place: Place = Tensor.contiguous
) -> QuantisedWeight:
    """gate, up: [out, in] each; for the rest see `pack_quantised`."""
    codes, scales = map(place, _quantised_tiles(_interleaved(gate, up, tile), tile, bits, group))
    return QuantisedWeight(codes, scales, bits, group, 2 * gate.shape[0], gate.shape[1], gated=True)


def _filled(weight: Tensor, tile: int) -> Tensor:
    return functional.pad(weight, (0, 0, 0, -weight.shape[0] % tile))


def _interleaved(gate: Tensor, up: Tensor, tile: int) -> Tensor:
    half = tile // 2
    halves = [_filled(part, half).view(-1, half, gate.shape[1]) for part in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def _tiles(weight: Tensor, tile: int) -> Tensor:
    unit = 4 // weight.element_size()
    if weight.shape[1] % unit:
        raise ValueError(f"weight: got {weight.shape[1]} input features in {weight.dtype}; allowed: an even number")
    tiles = weight.reshape(-1, tile, weight.shape[1] // unit, unit)  # [tiles, tile, in / unit, unit]
    return tiles.transpose(1, 2)


def _quantised_tiles(weight: Tensor, tile: int, bits: int, group: int) -> tuple[Tensor, Tensor]:
    if weight.shape[1] % 2 or group % 2:
        got = f"{weight.shape[1]} input features in groups of {group}"
        raise ValueError(f"weight: got {got}; allowed: even numbers")
    quantised = quantise(weight, bits, group)
    codes, scales = quantised.codes, quantised.scales
    if quantised.offsets is not None:
        scales = pack_scales(scales, quantised.offsets)
    scales = scales.view(-1, tile, scales.shape[1]).transpose(1, 2)
    codes = codes.view(-1, tile, codes.shape[1]).transpose(1, 2)  # [tiles, in, tile]
    if bits == 4:
        codes = (codes + 8).to(torch.uint8)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes, scales
