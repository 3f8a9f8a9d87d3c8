"""gated_activation against its definition."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels import gated_activation as ops
from nereid_kernels.reference import gated_activation as reference
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.triton_lang.devices import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_equals_its_definition(activation: str, dtype: torch.dtype, backend: str) -> None:
    gate_up = (3 * torch.randn(5, 2 * 123 + 7)).to(dtype)[:, : 2 * 123]  # strided rows
    gate_up[0, :3] = torch.tensor([0.0, -60.0, 60.0])  # either end of the activation
    out = ops.gated_activation(gate_up, activation, backend=backend)
    exact = reference.gated_activation(gate_up.double(), activation)
    assert_as_good_as_plain(out, exact, reference.gated_activation(gate_up, activation))


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (2, 1030)])
def test_any_shape(rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width)
    out = ops.gated_activation(gate_up, backend="triton_lang")
    exact = reference.gated_activation(gate_up.double(), "silu")
    assert_as_good_as_plain(out, exact, reference.gated_activation(gate_up, "silu"))


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"gate_up: got width 5; allowed: even"):
        ops.gated_activation(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"activation: got 'relu'; allowed: silu"):
        ops.gated_activation(torch.zeros(2, 4), "relu")
    with pytest.raises(TypeError, match=r"gate_up: got torch.int32"):
        ops.gated_activation(torch.zeros(2, 4, dtype=torch.int32))


def test_is_a_custom_operator() -> None:
    arguments = (torch.randn(2, 8), "silu")
    torch.library.opcheck(ops._gated_activation, arguments, test_utils=("test_schema", "test_faketensor"))
