"""How close a kernel has to come: twice the error that plain PyTorch makes in the same dtype, as in flash-attention's
own tests. One unit in the last place of the largest value is always granted, since plain PyTorch may be exact by luck.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FACTOR = 2.0


def assert_as_good_as_plain(result: Tensor, exact: Tensor, plain: Tensor) -> None:
    """result: the kernel's.  exact: the reference in float64.  plain: the reference in the inputs' own dtype."""
    assert result.shape == exact.shape and result.isfinite().all(), "a NaN, an infinity or a wrong shape"
    if result.numel() == 0:
        return
    unit = torch.finfo(result.dtype).eps * exact.abs().max().item()
    allowed = _FACTOR * (plain.double() - exact).abs().max().item() + unit
    error = (result.double() - exact).abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
