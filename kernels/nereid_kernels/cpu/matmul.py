"""matmul on the CPU, where a row's result depends neither on the other rows, nor on their number, nor on its place.

Plain `linear` breaks that: its library takes another routine for few rows than for many, and with it another order of
summation, and, where a thread gets few output features, looks at the alignment of a row in memory. So a product is only
ever made in tiles of fixed numbers of rows, filled up with zeros, each row at a multiple of 64 bytes.
Which numbers of rows give the same bits depends on processor, threads and the weight's shape: `row_tiles` finds them
out; where any do, a tile of 16 rows is among them.

That a row's place in a tile does not matter is measured too, not promised by the libraries underneath. Bits may differ
between numbers of threads, and between processors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BASE_TILE = 16
_TILES = (512, 256, 128, 64, 32, 8, 4)  # that are tried beside it
_MOST_OUTPUTS = 1 << 22  # of a tile: beyond that a larger one gains nothing, and takes long to try
_ALIGNMENT = 64  # bytes; what torch's own allocations have


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: tuple[int, ...] = (BASE_TILE,)) -> Tensor:
    """x: [rows, in].  weight: [out, in].  bias: [out], added after the product was rounded to x's dtype.

    tiles: numbers of rows that a product may be made of, descending; of `row_tiles`.
    """
    rows = x.shape[0]
    sizes = _cut(rows, tiles)
    parts = torch.split(_align(x, sum(sizes)), sizes)
    products = [functional.linear(part, weight) for part in parts]
    out = (products[0] if len(products) == 1 else torch.cat(products))[:rows]
    return out if bias is None else out + bias


def row_tiles(weight: Tensor) -> tuple[int, ...]:
    """The numbers of rows, descending, whose products by such a weight [out, in] give a row the same bits wherever in
    the tile it stands. Empty where not even tiles of `BASE_TILE` rows do.

    A matter of the weight's shape and dtype, not of its values. Takes the time of about 30 small products, so it is for
    the start of a server, not for a step.
    """
    x, cancelling = _cancelling(weight)
    wanted = functional.linear(_align(x, BASE_TILE), cancelling)

    def agrees(tile: int) -> bool:
        for shift in range(BASE_TILE if tile <= BASE_TILE else 2):
            rows = (torch.arange(tile) * (1 + 2 * shift) + shift) % BASE_TILE
            if not torch.equal(functional.linear(_align(x[rows], tile), cancelling), wanted[rows]):
                return False
        return True

    if not agrees(BASE_TILE):
        return ()
    tried = [tile for tile in _TILES if tile * weight.shape[0] <= _MOST_OUTPUTS]
    return tuple(sorted((BASE_TILE, *filter(agrees, tried)), reverse=True))


def _cancelling(weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [BASE_TILE, in], and a weight like the given one, whose product is zero but for what summation loses.

    Between sums that are not near zero, rounding to bfloat16 would hide all but one difference in ten thousand.
    """
    random = torch.Generator().manual_seed(0)
    out_features, in_features = weight.shape
    half, rest = in_features // 2, in_features % 2
    x = torch.randn(BASE_TILE, half, generator=random)
    rows = torch.randn(min(out_features, 509), half, generator=random)
    rows = torch.cat([rows, -rows, torch.zeros(len(rows), rest)], dim=1)[torch.arange(out_features) % len(rows)]
    return torch.cat([x, x, torch.zeros(BASE_TILE, rest)], dim=1).to(weight.dtype), rows.to(weight.dtype)


def _cut(rows: int, tiles: tuple[int, ...]) -> list[int]:
    """Tiles that cover `rows`, the largest first; the last one is filled up by less than half, or is the smallest."""
    sizes: list[int] = []
    left = max(rows, 1)
    while left > 0:
        holding = [tile for tile in tiles if left <= tile < 2 * left]
        sizes.append(holding[-1] if holding else next((tile for tile in tiles if tile <= left), tiles[-1]))
        left -= sizes[-1]
    return sizes


def _align(x: Tensor, rows: int) -> Tensor:
    """x with zero rows up to `rows`, each row at an aligned address. A copy, unless x is so already."""
    missing = rows - x.shape[0]
    unit = _ALIGNMENT // x.element_size()
    # With AMX, oneDNN (torch 2.13) takes bfloat16 in pairs, and of an odd row also what lies behind it, times zero: a
    # NaN there is a NaN in the product. So a zero has to lie there.
    pairs = x.shape[1] % 2 == 0
    if not missing and pairs and x.data_ptr() % _ALIGNMENT == 0 and x.stride(0) % unit == 0:
        return x
    return functional.pad(x, (0, -x.shape[1] % unit, 0, missing))[:, : x.shape[1]]
