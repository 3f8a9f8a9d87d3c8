"""The interpreter's faults are mended before any kernel runs."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter_shim import install

install()
torch.set_num_threads(1)  # the interpreter's tensors are small, and several processes share the cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
