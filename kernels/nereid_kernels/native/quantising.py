"""quantise: weights as whole numbers of 8 or 4 bits, with a scale for some inputs of each output feature, and of 4 bits
an offset.

With so few steps, a range that lies where the weights do loses less than one that has its middle at 0. Scales and
offsets of 4 bits are rounded to bfloat16 before the codes are chosen. The range is the one whose squared error is least
among a few: the outermost weights need not be met exactly, as in Nagel et al. 2021 (arXiv 2106.08295), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_LOW, _HIGH = {8: -127, 4: -8}, {8: 127, 4: 7}
_SHRINKS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}  # of the range that meets the outermost weights
_ROWS = 512  # at a time: they stay in the cache


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight is about its code * scale + offset.

    codes: [out, in] int8, of -127 to 127 or -8 to 7.  scales: [out, groups] float32.  offsets: the same; None of 8
    bits.  group: inputs that share a scale; the last may be fewer.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int

    def numbers(self) -> Tensor:
        """[out, in] float64: the weights that the codes stand for."""
        numbers = self.codes.double() * self._by_input(self.scales)
        return numbers if self.offsets is None else numbers + self._by_input(self.offsets)

    def _by_input(self, column: Tensor) -> Tensor:
        return column.double().repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]


def quantise(weight: Tensor, bits: int, group: int) -> Quantised:
    """weight: [out, in] of a float dtype.  bits: 8 or 4.  group: inputs that share a scale."""
    make = _symmetric if bits == 8 else _with_offset
    parts = []
    for part in torch.split(weight, _ROWS):
        # What fills up the last group repeats its last weight, which widens no range.
        filled = functional.pad(part.float(), (0, -part.shape[1] % group), mode="replicate")
        parts.append(make(filled.view(len(part), -1, group)))
    codes, scales, offsets = (torch.cat(column) for column in zip(*parts, strict=True))
    return Quantised(codes[:, : weight.shape[1]], scales, offsets if bits == 4 else None, group)


def _symmetric(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """values: [out, groups, group]. Returns codes [out, groups * group], scales [out, groups], and zeros."""
    scale = (values.abs().amax(dim=2, keepdim=True) / _HIGH[8]).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (values / scale).round_().clamp_(_LOW[8], _HIGH[8])
    return codes.flatten(1).to(torch.int8), scale[:, :, 0], torch.zeros_like(scale[:, :, 0])


def _with_offset(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with offsets."""
    least, most = values.aminmax(dim=2, keepdim=True)
    middle, half = (least + most) / 2, (most - least) / 2
    best_codes, best_scale, best_offset = torch.zeros_like(values), torch.zeros_like(least), torch.zeros_like(least)
    best_error = torch.full_like(least, torch.inf)
    for shrink in _SHRINKS[4]:
        scale = _rounded(half * (2 * shrink / (_HIGH[4] - _LOW[4]))).clamp_(min=torch.finfo(torch.bfloat16).tiny)
        offset = _rounded(middle - half * shrink - _LOW[4] * scale)
        codes = ((values - offset) / scale).round_().clamp_(_LOW[4], _HIGH[4])
        error = (codes * scale + offset - values).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best_codes, best_scale = torch.where(better, codes, best_codes), torch.where(better, scale, best_scale)
        best_offset, best_error = torch.where(better, offset, best_offset), torch.minimum(error, best_error)
    return best_codes.flatten(1).to(torch.int8), best_scale[:, :, 0], best_offset[:, :, 0]


def _rounded(values: Tensor) -> Tensor:
    """To bfloat16, as float32."""
    return values.bfloat16().float()
