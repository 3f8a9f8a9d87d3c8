"""Where the kernels run: in the interpreter, whose faults are mended first, or on a GPU, then the default device."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels.backends import is_interpreting
from tests.kernels.interpreter_shim import install

if is_interpreting():
    install()
    torch.set_num_threads(1)  # the interpreter's tensors are small, and several processes share the cores
else:
    torch.set_default_device("cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
