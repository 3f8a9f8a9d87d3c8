"""Products against their definition, alone and gated; bits that depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from nereid_kernels.native.library import Library
from nereid_kernels.native.packing import PackedWeight, QuantisedWeight, pack, pack_gated, pack_quantised
from nereid_kernels.native.program import Program
from nereid_kernels.reference import gated_activation as gated_reference
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.native.programs import DTYPES, ROWS, arrays, filled

PACKINGS = [pack, partial(pack_quantised, bits=8, group=64), partial(pack_quantised, bits=4, group=32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (63, 64), (64, 10), (65, 576), (200, 130)])
def test_products_equal_the_definition(
    library: Library, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        program = Program(library, dtype, rows, 1)
        narrow = program.matmul(filled(program, x), pack(weight, library.tile), bias)
        wide = program.matmul(filled(program, x), pack(weight, library.tile), wide=True)
        program.run(arrays(rows))
        exact = x.double() @ weight.double().T
        assert_as_good_as_plain(narrow.memory, exact + bias, ((x @ weight.T).float() + bias).to(dtype))
        assert_as_good_as_plain(wide.memory, exact, x.float() @ weight.float().T + 1e-6 * exact.abs().max().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", [2, 32, 48, 100])
def test_gated_products_equal_the_definition(library: Library, dtype: torch.dtype, out_features: int) -> None:
    gate, up = (torch.randn(out_features, 64).to(dtype) for _ in range(2))
    x = torch.randn(33, 64).to(dtype)
    program = Program(library, dtype, 33, 1)
    result = program.matmul(filled(program, x), pack_gated(gate, up, library.tile))
    program.run(arrays(33))

    def defined(at: torch.dtype) -> Tensor:
        both = torch.cat((x.to(at) @ gate.to(at).T, x.to(at) @ up.to(at).T), dim=1)
        return gated_reference.gated_activation(both, "silu")

    assert_as_good_as_plain(result.memory, defined(torch.float64), defined(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", PACKINGS)
@pytest.mark.parametrize("in_features", [130, 160])
def test_a_row_of_a_product_has_the_same_bits_whatever_is_beside_it(
    library: Library,
    make: Callable[[Tensor, int], PackedWeight | QuantisedWeight],
    dtype: torch.dtype,
    in_features: int,
) -> None:
    """Tile registers take inputs by 32."""
    most = 300  # more rows than are shared out by columns
    weight, x = torch.randn(200, in_features).to(dtype), torch.randn(most, in_features).to(dtype)
    program = Program(library, dtype, most, 1)
    x_buffer = filled(program, x)
    y = program.matmul(x_buffer, make(weight, library.tile))
    program.run(arrays(most))
    whole = y.memory.clone()
    for rows in (*range(1, 19), 31, 33, 70):
        for start in (0, 3, most - rows):
            x_buffer.memory[:rows] = x[start : start + rows]
            program.run(arrays(rows))
            assert torch.equal(y.memory[:rows], whole[start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", PACKINGS)
def test_many_rows_equal_the_definition(
    library: Library, make: Callable[[Tensor, int], PackedWeight | QuantisedWeight], dtype: torch.dtype
) -> None:
    """Each row picks one column of weights out, which come back as they are, but for quantising."""
    weight, most = torch.randn(130, 320).to(dtype), 320
    program = Program(library, dtype, most, 1)
    y = program.matmul(filled(program, torch.eye(most, dtype=dtype)), make(weight, library.tile))
    program.run(arrays(most))
    slack = 0.0 if make is pack else float(weight.float().abs().max()) / 7
    assert float((y.memory.float() - weight.float().T).abs().max()) <= slack


def test_rows_past_the_step_are_left_alone(library: Library) -> None:
    program = Program(library, torch.float32, 8, 1)
    y = program.matmul(filled(program, torch.randn(8, 64)), pack(torch.randn(70, 64), library.tile))
    y.memory.fill_(7.0)
    program.run(arrays(5))
    assert bool((y.memory[5:] == 7.0).all()) and not bool((y.memory[:5] == 7.0).any())
