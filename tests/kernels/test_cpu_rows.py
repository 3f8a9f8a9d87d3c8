"""What runs row by row on the CPU has the same bits for a row whatever rows are beside it (matmul: test_cpu_matmul.py).

Threads cut a large tensor anywhere, and PyTorch has other code for what is left over of a division into vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from nereid_kernels.gated_activation import ACTIVATIONS, gated_activation
from nereid_kernels.rms_norm import add_rms_norm, rms_norm

MAX_ROWS = 512
WIDTHS = (5, 123, 1000, 1536, 4097)


def assert_same_bits(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    alone = torch.cat([operation(row) for row in torch.split(x, 1)])
    for rows in (2, 3, 5, 16, 17, 33, 127, 200, MAX_ROWS - 1, MAX_ROWS):
        for start in (0, 1) if rows < MAX_ROWS else (0,):
            part = slice(start, start + rows)
            assert torch.equal(operation(x[part]), alone[part]), (x.shape[1], x.dtype, start, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(threads: int, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width in WIDTHS:
        gate_up = (3 * torch.randn(MAX_ROWS, 2 * width)).to(dtype)
        assert_same_bits(partial(gated_activation, activation=activation, deterministic=True), gate_up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width in WIDTHS:
        both, weight = torch.randn(MAX_ROWS, 2 * width).to(dtype), torch.randn(width).to(dtype)
        assert_same_bits(partial(rms_norm, weight=weight, eps=1e-5), both[:, :width])
        assert_same_bits(partial(_add_halves, weight=weight), both)


def _add_halves(both: Tensor, weight: Tensor) -> Tensor:
    x, residual = both.chunk(2, dim=1)
    return torch.cat(add_rms_norm(x, residual, weight, 1e-5), dim=1)


def test_a_deterministic_row_equals_the_definition_as_well() -> None:
    """No rows, one wide row, and rows of width 0."""
    for rows, width in ((0, 8), (1, 40000), (3, 20000), (2, 0)):
        gate_up = torch.randn(rows, 2 * width, dtype=torch.float32)
        for activation in ACTIVATIONS:
            out = gated_activation(gate_up, activation, deterministic=True)
            torch.testing.assert_close(out, gated_activation(gate_up, activation))
