"""How close a kernel has to come: twice the error that plain PyTorch makes in the same dtype, as in flash-attention's
own tests. One unit in the last place is always granted, since plain PyTorch may be exact by luck.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FACTOR = 2.0
_PART_FACTOR = 4.0


def assert_as_good_as_plain(result: Tensor, exact: Tensor, plain: Tensor, parts: Sequence[int] | None = None) -> None:
    """result: the kernel's.  exact: the reference in float64.  plain: the reference in the inputs' own dtype.

    The largest errors are compared over all. So is the root mean square for each part by itself, by a wider bound, for
    it says more: in the large values of one sequence the small ones of another would go under.
    parts: sizes along the first dimension.
    """
    assert result.shape == exact.shape and result.isfinite().all(), "a NaN, an infinity or a wrong shape"
    if result.numel() == 0:
        return
    unit = torch.finfo(result.dtype).eps
    largest, usual = (result.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    _compare(largest, _FACTOR * usual + unit * exact.abs().max())
    sizes = [len(result)] if parts is None else list(parts)
    for got, want, same in zip(*(torch.split(x, sizes) for x in (result, exact, plain)), strict=True):
        if want.numel():
            _compare(_rms(got.double() - want), _PART_FACTOR * _rms(same.double() - want) + unit * _rms(want))


def _compare(error: Tensor, allowed: Tensor) -> None:
    assert error <= allowed, f"error {float(error):.3g}, allowed {float(allowed):.3g}"


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
