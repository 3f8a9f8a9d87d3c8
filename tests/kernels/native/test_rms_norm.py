"""Norms, alone and of a sum, against their definition."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels.native.library import Library
from nereid_kernels.native.program import Program
from nereid_kernels.reference import rms_norm as norm_reference
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.native.programs import DTYPES, arrays, filled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 576, 1000])
def test_norms_equal_the_definition(library: Library, dtype: torch.dtype, width: int) -> None:
    x, residual = (torch.randn(5, width).to(dtype) for _ in range(2))
    weight = torch.randn(width)
    program = Program(library, dtype, 5, 1)
    alone = program.rms_norm(filled(program, x), weight, 1e-5, weight_offset=1.0)
    normed, total = program.add_rms_norm(filled(program, x), filled(program, residual), weight, 1e-5)
    program.run(arrays(5))
    assert torch.equal(total.memory, x + residual)
    for result, source, offset in ((alone, x, 1.0), (normed, x + residual, 0.0)):
        exact = norm_reference.rms_norm(source.double(), weight.double(), 1e-5, weight_offset=offset)
        plain = norm_reference.rms_norm(source, weight.to(dtype), 1e-5, weight_offset=offset)
        assert_as_good_as_plain(result.memory, exact, plain)
