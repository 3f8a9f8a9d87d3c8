"""Rows of a table by token, and of the step by number."""

from __future__ import annotations

import torch

from nereid_kernels.native.library import Library
from nereid_kernels.native.program import Program
from tests.kernels.native.programs import arrays


def test_rows_are_taken_by_number(library: Library) -> None:
    table = torch.randn(50, 24)
    program = Program(library, torch.float32, 6, 4)
    hidden = program.hidden_rows(program.take_rows(table))
    tokens, rows = torch.tensor([3, 0, 49, 49, 7, 1]), torch.tensor([5, 0, 3])
    program.run(arrays(6, token_ids=tokens, hidden_rows=rows))
    assert torch.equal(hidden.memory[:3], table[tokens[rows]])
