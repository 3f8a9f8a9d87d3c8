"""Counts what a launch does while the interpreter runs it: bytes loaded and stored, and operations of matrix products.

By the same rules as nereid_kernels.cost: indices (int32 and int64) are left out, masked elements as well. Integers that
are data are to be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from nereid_kernels.cost import Cost

_INDICES = (tl.int32, tl.int64)


class Counter:
    """What has been counted so far. Elements of one address always have the same size."""

    def __init__(self, integers: Sequence[Tensor]) -> None:
        self._integers = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in integers]  # dense ones
        self._read: dict[int, list[NDArray[Any]]] = {}  # bytes an element -> addresses, with repetitions
        self._written: dict[int, list[NDArray[Any]]] = {}
        self._flops = 0

    def read(self, pointers: Any, mask: Any) -> None:
        self._note(self._read, pointers, mask)

    def write(self, pointers: Any, mask: Any) -> None:
        self._note(self._written, pointers, mask)

    def multiply(self, a: Any, b: Any) -> None:
        self._flops += 2 * a.data.size * b.data.shape[-1]

    def _note(self, addresses: dict[int, list[NDArray[Any]]], pointers: Any, mask: Any) -> None:
        dtype = pointers.get_element_ty()
        pointed, chosen = np.broadcast_arrays(pointers.data, mask.data)
        found = pointed[chosen.astype(bool)].ravel()
        if dtype in _INDICES:
            inside = [(found >= start) & (found < end) for start, end in self._integers]
            found = found[np.any(inside, axis=0)] if inside else found[:0]
        addresses.setdefault(dtype.primitive_bitwidth // 8, []).append(found)

    def cost(self) -> Cost:
        distinct = sum(_bytes(addresses, np.unique) for addresses in (self._read, self._written))
        return Cost(_bytes(self._read), _bytes(self._written), distinct, self._flops)


def _bytes(addresses: dict[int, list[NDArray[Any]]], reduce: Callable[[Any], Any] = lambda array: array) -> int:
    return sum(size * len(reduce(np.concatenate(arrays))) for size, arrays in addresses.items())


@contextmanager
def counting(*integers: Tensor) -> Iterator[Counter]:
    """Every launch inside is counted. integers: tensors of int32 or int64 that are no indices."""
    counter = Counter(integers)
    load, store, dot = (
        getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store", "create_dot")
    )

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        counter.read(ptrs, mask)
        return load(self, ptrs, mask, *rest, **options)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        counter.write(ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **options)

    def counted_dot(self: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        counter.multiply(a, b)
        return dot(self, a, b, *rest, **options)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        patch.object(InterpreterBuilder, "create_masked_store", counted_store),
        patch.object(InterpreterBuilder, "create_dot", counted_dot),
    ):
        yield counter
