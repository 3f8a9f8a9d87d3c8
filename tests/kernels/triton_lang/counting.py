"""Counts what a launch does while the interpreter runs it: bytes loaded and stored, and operations of matrix products.

By the same rules as nereid_kernels.cost: indices (int32 and int64) are left out, masked elements as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder

from nereid_kernels.cost import Cost

_INDICES = (tl.int32, tl.int64)


class Counter:
    """What has been counted so far. Elements of one address always have the same size."""

    def __init__(self) -> None:
        self._read: dict[int, list[NDArray[Any]]] = {}  # bytes an element -> addresses, with repetitions
        self._written: dict[int, list[NDArray[Any]]] = {}
        self._flops = 0

    def read(self, pointers: Any, mask: Any) -> None:
        _note(self._read, pointers, mask)

    def write(self, pointers: Any, mask: Any) -> None:
        _note(self._written, pointers, mask)

    def multiply(self, a: Any, b: Any) -> None:
        self._flops += 2 * a.data.size * b.data.shape[-1]

    def cost(self) -> Cost:
        distinct = sum(_bytes(addresses, np.unique) for addresses in (self._read, self._written))
        return Cost(_bytes(self._read), _bytes(self._written), distinct, self._flops)


def _note(addresses: dict[int, list[NDArray[Any]]], pointers: Any, mask: Any) -> None:
    dtype = pointers.get_element_ty()
    if dtype not in _INDICES:
        pointed, chosen = np.broadcast_arrays(pointers.data, mask.data)
        addresses.setdefault(dtype.primitive_bitwidth // 8, []).append(pointed[chosen.astype(bool)].ravel())


def _bytes(addresses: dict[int, list[NDArray[Any]]], reduce: Callable[[Any], Any] = lambda array: array) -> int:
    return sum(size * len(reduce(np.concatenate(arrays))) for size, arrays in addresses.items())


@contextmanager
def counting() -> Iterator[Counter]:
    """Every launch inside is counted."""
    counter = Counter()
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
