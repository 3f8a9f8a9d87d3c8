"""quantise: weights as whole numbers of 8 or 4 bits and a scale for some inputs of each output feature.

Scales are chosen so that the squared error is least among a few: the largest magnitude need not be met exactly, as in
Nagel et al. 2021 (arXiv 2106.08295), section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_RANGES = {8: (-127, 127), 4: (-8, 7)}
_SHRINKS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}  # of the scale that meets the largest magnitude
_ROWS = 512  # at a time


def quantise(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """(codes [out, in] int8, scales [out, groups] float32): weight is about codes * scales.

    weight: [out, in] of a float dtype.  group: inputs that share a scale; the last may be fewer.
    """
    parts = [_quantise(part, bits, group) for part in torch.split(weight, _ROWS)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes[:, : weight.shape[1]], scales


def _quantise(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    low, high = _RANGES[bits]
    values = functional.pad(weight.float(), (0, -weight.shape[1] % group)).view(len(weight), -1, group)
    largest = values.gather(2, values.abs().argmax(dim=2, keepdim=True))  # with its sign
    smallest = torch.finfo(torch.float32).tiny
    best_codes, best_scale = torch.zeros_like(values), torch.ones_like(largest)
    least = torch.full_like(largest, torch.inf)
    # The lowest code has the largest magnitude: a scale below 0 turns that to where it is wanted.
    for bound in {low, high} if -low != high else {high}:
        for shrink in _SHRINKS[bits]:
            scale = largest * shrink / bound
            scale = torch.where(scale.abs() < smallest, smallest, scale)
            codes = (values / scale).round_().clamp_(low, high)
            error = (codes * scale - values).square_().sum(dim=2, keepdim=True)
            better = error < least
            best_codes, best_scale = torch.where(better, codes, best_codes), torch.where(better, scale, best_scale)
            least = torch.minimum(error, least)
    return best_codes.flatten(1).to(torch.int8), best_scale[:, :, 0]
