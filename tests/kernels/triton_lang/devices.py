"""What differs between the interpreter and a GPU, on which the same tests run: see conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nereid_kernels.backends import is_interpreting

ON_GPU = not is_interpreting()
BACKENDS = ("triton_lang",) if ON_GPU else ("triton_lang", "cpu")  # those that take tensors on the default device

interpreter_only = pytest.mark.skipif(ON_GPU, reason="tests the interpreter, which is off on a GPU")
Reserve = Callable[[int, torch.dtype], Tensor]  # the fixture `reserve`: (elements, dtype) -> a large tensor


def to_default_device(tensor: Tensor) -> Tensor:
    """Of numbers that have to be the same everywhere, and were therefore drawn on the CPU."""
    return tensor.to(torch.get_default_device())
