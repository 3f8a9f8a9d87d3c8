"""Weights in the order in which the native products read them: tile after tile, each in one piece.

A tile is `tile` output features: [in][tile] float32, or [in / 2][tile][2] bfloat16, or words of codes of 8 or 4 bits;
the last one is filled up with zeros. What is gated has, in each tile, half of it gates and half what they gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nereid_kernels.formats import pack_scales
from nereid_kernels.native.quantising import quantise

REVISION = 3
"""Raise it when other bits come of the same quantised weights, or in another order: stored ones are then void."""

_UNIT = 8  # inputs that codes are filled up to

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

    codes: [tiles, in / 4 or 8, tile] int32 of 8 or 4 bits, `in` filled up to a multiple of 8: four or eight inputs a
    word, of inputs 2k and 2k + 1 the fields k of its two halves; 128 or 8 stands for 0.  scales: [tiles, groups, tile]:
    float32 of 8 bits; of 4, int32 with a scale's bfloat16 in the upper half and an offset's in the lower.
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
    """weight: [out, in] of a float dtype.  bits: 8 or 4.  group: a multiple of 8."""
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
    if group % _UNIT:
        raise ValueError(f"group: got {group}; allowed: a multiple of {_UNIT}")
    quantised = quantise(weight, bits, group)
    scales = quantised.scales
    if quantised.offsets is not None:
        scales = pack_scales(scales, quantised.offsets)
    scales = scales.view(-1, tile, scales.shape[1]).transpose(1, 2)
    return _packed_codes(quantised.codes, tile, bits), scales


def _packed_codes(codes: Tensor, tile: int, bits: int) -> Tensor:
    """codes: [out, in] int8."""
    per_word = 32 // bits
    filled = functional.pad(codes, (0, -codes.shape[1] % _UNIT)).to(torch.int32) + (1 << (bits - 1))
    pairs = filled.view(-1, tile, filled.shape[1] // per_word, per_word // 2, 2)  # [tiles, tile, words, field, half]
    words = pairs[..., 0] | pairs[..., 1] << 16
    places = torch.arange(per_word // 2, dtype=torch.int32) * bits
    return (words << places).sum(dim=3, dtype=torch.int32).transpose(1, 2)
