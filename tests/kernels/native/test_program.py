"""What a program makes of its buffers."""

from __future__ import annotations

import torch

from nereid_kernels.native.library import Library
from nereid_kernels.native.packing import pack
from nereid_kernels.native.program import Program
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
