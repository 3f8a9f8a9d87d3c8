"""matmul against its definition, and its rows against each other, bit by bit."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels import matmul as ops
from nereid_kernels.reference import matmul as reference
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.triton_lang.devices import BACKENDS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "has_bias"),
    [(1, 1, 1, True), (5, 123, 70, False), (70, 64, 130, True), (0, 64, 8, False)],
)
def test_equals_its_definition(
    rows: int, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x = torch.full((rows, in_features + 3), torch.nan, dtype=dtype)[:, :in_features]  # strided rows
    x.copy_(torch.randn(rows, in_features))
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    out = ops.matmul(x, weight, bias, backend="triton_lang")
    exact = reference.matmul(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_good_as_plain(out, exact, reference.matmul(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """At the same place in a tile only: the interpreter's product is numpy's, which sums differently by place."""
    x, weight = torch.randn(69, 200).to(dtype), torch.randn(65, 200).to(dtype)
    whole = ops.matmul(x, weight, backend="triton_lang")
    for start, end in ((0, 1), (32, 40), (64, 69)):
        assert torch.equal(ops.matmul(x[start:end], weight, backend="triton_lang"), whole[start:end])


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = torch.randn(3, 20), torch.randn(5, 20)
    x[1] = torch.nan
    for backend in BACKENDS:
        assert ops.matmul(x, weight, backend=backend).isnan().any(dim=1).tolist() == [False, True, False]


def test_no_inputs_leave_the_bias() -> None:
    bias = torch.randn(7)
    for backend in BACKENDS:
        out = ops.matmul(torch.zeros(2, 0), torch.zeros(7, 0), bias, backend=backend)
        assert torch.equal(out, bias.expand(2, 7))


def test_what_it_refuses() -> None:
    x, weight = torch.zeros(2, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"weight: got shape \[3, 5\]; allowed: \[out=3, in=4\]"):
        ops.matmul(x, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"weight: got strides \(1, 3\); allowed"):
        ops.matmul(x, torch.zeros(4, 3).T)
    with pytest.raises(ValueError, match=r"bias: got shape \[4\]; allowed: \[out=3\]"):
        ops.matmul(x, weight, torch.zeros(4))
    with pytest.raises(TypeError, match=r"weight: got torch.bfloat16; allowed: torch.float32"):
        ops.matmul(x, weight.bfloat16())


def test_is_a_custom_operator() -> None:
    arguments = (torch.randn(2, 8), torch.randn(3, 8), None)
    torch.library.opcheck(ops._matmul, arguments, test_utils=("test_schema", "test_faketensor"))
