"""Products with weights of 8 and 4 bits against their definition; what quantising loses."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels.native.library import Library
from nereid_kernels.native.packing import pack_quantised, pack_quantised_gated
from nereid_kernels.native.program import Program
from nereid_kernels.native.quantising import quantise
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.native.programs import DTYPES, ROWS, arrays, filled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(8, 576), (8, 32), (4, 32), (4, 128)])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (65, 576), (200, 130)])
def test_quantised_products_equal_the_definition(
    library: Library, dtype: torch.dtype, out_features: int, in_features: int, bits: int, group: int
) -> None:
    weight = torch.randn(out_features, in_features)
    dequantised = quantise(weight, bits, group).numbers()
    if library.variant == "amx" and dtype == torch.bfloat16 and in_features % 32 == 0:
        dequantised = dequantised.bfloat16().to(dequantised.dtype)  # they meet their scales before they are multiplied
    packed = pack_quantised(weight, library.tile, bits, group)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        program = Program(library, dtype, rows, 1)
        narrow = program.matmul(filled(program, x), packed)
        wide = program.matmul(filled(program, x), packed, wide=True)
        program.run(arrays(rows))
        exact = x.double() @ dequantised.T
        assert_as_good_as_plain(narrow.memory, exact, (x.float() @ dequantised.float().T).to(dtype))
        slack = 1e-6 * exact.abs().max().float()
        assert_as_good_as_plain(wide.memory, exact, x.float() @ dequantised.float().T + slack)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_gated_products_are_two_products(library: Library, bits: int) -> None:
    gate, up = (torch.randn(100, 64) for _ in range(2))
    x = torch.randn(9, 64)
    program = Program(library, torch.float32, 9, 1)
    gated = program.matmul(filled(program, x), pack_quantised_gated(gate, up, library.tile, bits, 32))
    apart = [program.matmul(filled(program, x), pack_quantised(w, library.tile, bits, 32)) for w in (gate, up)]
    program.run(arrays(9))
    torch.testing.assert_close(gated.memory, torch.nn.functional.silu(apart[0].memory) * apart[1].memory)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 1000), (4, 32), (4, 128)])
def test_quantising_errs_no_more_than_rounding_to_steps_of_the_largest_number(bits: int, group: int) -> None:
    """Rows of zeros, and a largest magnitude below 0, are exact."""
    weight = torch.randn(64, 1024)
    error = quantise(weight, bits, group).numbers() - weight
    steps = torch.stack([part.abs().amax(dim=1) for part in torch.split(weight, group, dim=1)], dim=1) / (
        2 ** (bits - 1) - 1
    )
    step = steps.repeat_interleave(group, dim=1)[:, :1024]
    rounded = (weight / step).round() * step - weight
    assert error.square().mean() <= rounded.square().mean() * (1.0001 if bits == 8 else 0.9)
    assert not quantise(torch.zeros(3, 8), bits, 4).numbers().any()
    ends = torch.tensor([[-8.0, 7.0]])
    torch.testing.assert_close(quantise(ends, bits, 2).numbers().float(), ends, rtol=0.005, atol=0)


def test_weights_on_a_grid_of_sixteen_steps_lose_nothing_in_four_bits() -> None:
    """Wherever it begins: a range about 0 would lose most of it."""
    steps = torch.randint(16, (50, 4, 32))
    steps[:, :, 0], steps[:, :, 1] = 0, 15
    scale, minimum = (torch.rand(50, 4, 1) + 0.5).bfloat16().float(), torch.randn(50, 4, 1)
    weight = (steps * scale + minimum).flatten(1)
    error = quantise(weight, 4, 32).numbers() - weight
    assert (error.view(50, 4, 32).abs() <= scale * 0.06).all()  # the rounding of the offset
