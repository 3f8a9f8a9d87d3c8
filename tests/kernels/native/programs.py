"""What the tests of the native operations share: programs of one operation, and a step for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nereid_kernels.native.program import Buffer, Program, Rows, StepArrays

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 5, 6, 7, 12, 33)


def arrays(num_tokens: int, **others: Any) -> StepArrays:
    """A step; what is not given is empty."""
    none = torch.empty(0, dtype=torch.int64)
    fields = {"token_ids": torch.zeros(num_tokens, dtype=torch.int64), "positions": none, "hidden_rows": none}
    return StepArrays(**{**fields, "cu_query_lens": none.int(), "seq_lens": none.int(), "groups": (), **others})


def filled(program: Program, x: Tensor, rows: Rows = Rows.TOKENS) -> Buffer:
    buffer = program.input(rows, x.shape[1])
    buffer.memory[: len(x)] = x
    return buffer
