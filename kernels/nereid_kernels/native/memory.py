"""Memory of the CPU that is read far and wide: on large pages, where the system gives some.

A page is looked up in a table before it is read, and of small pages there are more than the processor remembers.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20
_CHUNK = 256 << 20  # which the system gives page by page
_LINE = 64


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


class Arena:
    """Memory for tensors that are read one after the other: side by side, where the processor's looking ahead does not
    end with each of them. It stays as long as any of them."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, tensor: Tensor) -> Tensor:
        """A copy, contiguous."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._chunk):
            self._chunk = empty((max(size, _CHUNK) + _LARGE_PAGE,), torch.uint8)
            self._used = -self._chunk.data_ptr() % _LARGE_PAGE
        place = self._chunk[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
