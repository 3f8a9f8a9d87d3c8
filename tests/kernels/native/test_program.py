"""What a program makes of its buffers."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels.native.library import Library
from nereid_kernels.native.packing import pack
from nereid_kernels.native.program import Program, Rows
from tests.kernels.native.programs import filled


def test_a_buffer_is_used_again_once_nobody_holds_it(library: Library) -> None:
    program = Program(library, torch.float32, 4, 1)
    x = filled(program, torch.randn(4, 64))
    weight = pack(torch.eye(64), library.tile)
    first = program.matmul(x, weight)
    second = program.matmul(first, weight)
    address = first.address
    del first
    assert program.matmul(second, weight).address == address


def test_a_program_of_hidden_rows_runs_on_rows_from_anywhere(library: Library) -> None:
    program = Program(library, torch.float32, 0, 4)
    x = program.input(Rows.HIDDEN_ROWS, 64)
    doubled = program.matmul(x, pack(2 * torch.eye(64), library.tile))
    for count in (4, 1, 3):
        rows = torch.randn(count, 64)
        program.run_on(x, rows)
        assert torch.equal(doubled.memory[:count], 2 * rows)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(5, 64), torch.zeros(1, 63), torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(2, 128)[:, ::2]],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(library: Library, rows: torch.Tensor) -> None:
    program = Program(library, torch.float32, 0, 4)
    x = filled(program, torch.ones(4, 64), Rows.HIDDEN_ROWS)
    with pytest.raises(ValueError, match=r"rows: got .*allowed: torch.float32 \[4, 64\]"):
        program.run_on(x, rows)
    assert torch.equal(x.memory, torch.ones(4, 64))
