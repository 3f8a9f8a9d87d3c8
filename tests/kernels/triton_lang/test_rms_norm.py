"""rms_norm and add_rms_norm against their definition."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels import rms_norm as ops
from nereid_kernels.reference import rms_norm as reference
from tests.kernels.bounds import assert_as_good_as_plain

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "offset"), [(1, 1, 0.0), (5, 123, 1.0), (3, 576, 0.0), (0, 64, 0.0)])
def test_equals_its_definition(rows: int, width: int, offset: float, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, width + 3).to(dtype)[:, :, :width]  # strided rows
    weight = torch.randn(width).to(dtype)
    out = ops.rms_norm(x, weight, EPS, weight_offset=offset, backend="triton_lang")
    exact = reference.rms_norm(x.double(), weight.double(), EPS, offset)
    assert_as_good_as_plain(out, exact, reference.rms_norm(x, weight, EPS, offset))

    out, total = ops.add_rms_norm(x, residual, weight, EPS, weight_offset=offset, backend="triton_lang")
    assert torch.equal(total, x + residual)
    exact = reference.rms_norm(total.double(), weight.double(), EPS, offset)
    assert_as_good_as_plain(out, exact, reference.rms_norm(total, weight, EPS, offset))
