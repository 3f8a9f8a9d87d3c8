"""Memory of the CPU that is read far and wide: on large pages, where the system gives some.

A page is looked up in a table before it is read, and of small pages there are more than the processor remembers.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU like torch.empty's, zero where it was never written; the system gives the memory when it is
    first touched."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)  # which keeps the memory


def placed(tensor: Tensor) -> Tensor:
    """A copy in such memory, contiguous."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
