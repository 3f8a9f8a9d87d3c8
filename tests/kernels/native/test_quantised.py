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


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [rows, in] as it is multiplied: in 16 bits with a scale for at most 128 inputs of a group; float64."""
    pieces = [piece for part in torch.split(x.float(), group, dim=1) for piece in torch.split(part, 128, dim=1)]
    made = []
    for piece in pieces:
        largest = piece.abs().amax(dim=1, keepdim=True)
        factor = torch.where(largest > 0, torch.full_like(largest, 32767) / largest, 0)  # 1 / x is another number
        made.append((piece * factor).round().double() * (largest / 32767))
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(8, 576), (8, 32), (8, 200), (4, 32), (4, 128), (4, 8)])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (65, 576), (200, 130)])
def test_quantised_products_equal_the_definition(
    library: Library, dtype: torch.dtype, out_features: int, in_features: int, bits: int, group: int
) -> None:
    weight = torch.randn(out_features, in_features)
    dequantised = quantise(weight, bits, group).numbers()
    packed = pack_quantised(weight, library.tile, bits, group)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        x[rows // 2, in_features // 2 :] = 0  # pieces of zeros
        program = Program(library, dtype, rows, 1)
        narrow = program.matmul(filled(program, x), packed)
        wide = program.matmul(filled(program, x), packed, wide=True)
        program.run(arrays(rows))
        whole = rounded(x, group)
        exact = whole @ dequantised.T
        plain = whole.float() @ dequantised.float().T
        assert_as_good_as_plain(narrow.memory, exact, plain.to(dtype))
        assert_as_good_as_plain(wide.memory, exact, plain + 1e-6 * exact.abs().max().float())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_own_row_alone(library: Library, bits: int, value: float) -> None:
    packed = pack_quantised(torch.randn(70, 200), library.tile, bits, 32)
    for rows in (2, 12):
        x = torch.randn(rows, 200)
        program = Program(library, torch.float32, rows, 1)
        given, clean = filled(program, x), filled(program, x)
        given.memory[1, 150] = value
        y, whole = program.matmul(given, packed), program.matmul(clean, packed)
        program.run(arrays(rows))
        others = [row for row in range(rows) if row != 1]
        assert y.memory[1].isnan().all() and torch.equal(y.memory[others], whole.memory[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 32)])
def test_a_rows_bits_depend_on_no_other_row(library: Library, dtype: torch.dtype, bits: int, group: int) -> None:
    packed = pack_quantised(torch.randn(200, 576), library.tile, bits, group)
    x = torch.randn(300, 576).to(dtype)
    program = Program(library, dtype, 300, 1)
    all_rows = filled(program, x)
    y = program.matmul(all_rows, packed)
    program.run(arrays(300))
    together = y.memory.clone()
    for first, count in ((0, 1), (1, 2), (5, 6), (11, 7), (30, 50), (299, 1)):
        all_rows.memory[:count] = x[first : first + count]
        program.run(arrays(count))
        assert torch.equal(y.memory[:count], together[first : first + count])


def test_numbers_of_next_to_nothing_make_nothing(library: Library) -> None:
    """Their scale's inverse is infinite."""
    program = Program(library, torch.float32, 2, 1)
    x = torch.cat((torch.full((2, 64), 1e-39), torch.randn(2, 64)), dim=1)
    packed = pack_quantised(torch.randn(70, 128), library.tile, 4, 32)
    y, alone = (program.matmul(filled(program, rows), packed) for rows in (x, x * (x.abs() > 1e-30)))
    program.run(arrays(2))
    assert torch.equal(y.memory, alone.memory)


def test_groups_that_do_not_hold_whole_units_are_refused() -> None:
    with pytest.raises(ValueError, match="group: got 12; allowed: a multiple of 8"):
        pack_quantised(torch.randn(4, 24), 64, 8, 12)


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
