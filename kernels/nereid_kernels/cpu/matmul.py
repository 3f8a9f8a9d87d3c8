"""matmul on the CPU, where a row's result depends neither on the other rows, nor on their number, nor on its place.

Plain `linear` breaks that: bits change between few rows and many (a matrix-vector routine against a blocked one), in
what is left over of a division into fours, and, where a thread gets few output features, with the alignment of a row
in memory. So a product is only ever made of rows in multiples of 4, each at an address that is a multiple of 64 bytes,
and of at most 512 of them at once.

That this is enough is measured, not promised by the libraries underneath: tests/kernels/test_cpu_matmul.py compares
bits, and `is_batch_invariant` does so for the processor, the threads and the weight at hand. Bits may differ between
numbers of threads, and between processors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 4
_ALIGNMENT = 64  # bytes; what torch's own allocations have
_MAX_ROWS = 512


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [rows, in].  weight: [out, in].  bias: [out], added after the product was rounded to x's dtype."""
    rows = x.shape[0]
    x = _align(x)
    if rows <= _MAX_ROWS:
        out = functional.linear(x, weight)[:rows]
    else:
        out = torch.cat([functional.linear(part, weight) for part in torch.split(x, _MAX_ROWS)])[:rows]
    return out if bias is None else out + bias


def is_batch_invariant(weight: Tensor) -> bool:
    """Whether a row of `matmul` by this weight [out, in] has the same bits alone and in batches of many sizes.

    Takes the time of about 40 small products, so it is for the start of a server, not for a step.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn(_MAX_ROWS, weight.shape[1], generator=random).to(weight.dtype)
    alone = torch.cat([matmul(x[row : row + 1], weight, None) for row in range(16)])
    inside = [(start, start + rows) for rows in (2, 3, 4, 5, 7, 8, 13) for start in (0, 1, 3)]
    return all(torch.equal(matmul(x[start:end], weight, None), alone[start:end]) for start, end in inside) and all(
        torch.equal(matmul(x[:rows], weight, None)[:16], alone) for rows in (16, 17, 32, 64, 100, 127, 256, _MAX_ROWS)
    )


def _align(x: Tensor) -> Tensor:
    """x with zero rows up to a multiple of 4, each row at an aligned address. A copy, unless x is so already."""
    missing = -x.shape[0] % _ROWS
    unit = _ALIGNMENT // x.element_size()
    if not missing and x.data_ptr() % _ALIGNMENT == 0 and x.stride(0) % unit == 0:
        return x
    return functional.pad(x, (0, -x.shape[1] % unit, 0, missing))[:, : x.shape[1]]
