"""matmul_int8, matmul_int4 and the functions that quantise, against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nereid_kernels import quantised_matmul as ops
from nereid_kernels.formats import GROUPS, pack_int4, unpack_int4
from nereid_kernels.reference import quantised_matmul as reference
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.triton_lang.devices import BACKENDS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    x = torch.full((rows, width + 3), torch.nan, dtype=dtype)[:, :width]
    return x.copy_(torch.randn(rows, width))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "group"), [(1, 1, 1, None), (18, 123, 70, None), (5, 96, 3, 32)]
)
def test_int8_equals_its_definition(
    rows: int, in_features: int, out_features: int, group: int | None, dtype: torch.dtype, backend: str
) -> None:
    x = _strided(rows, in_features, dtype)
    weight, scales = ops.quantise_int8(torch.randn(out_features, in_features), group)
    out = ops.matmul_int8(x, weight, scales, backend=backend)
    exact = reference.matmul_int8(x.double(), weight, scales)
    # Plain PyTorch gets zeros behind its rows: with AMX its products read what lies there where a row is odd.
    zeros_behind = torch.nn.functional.pad(x, (0, 3))[:, :in_features]
    assert_as_good_as_plain(out, exact, reference.matmul_int8(zeros_behind, weight, scales))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "group", "symmetric"), [(1, 32, 1, 32, True), (18, 256, 70, 128, False)]
)
def test_int4_equals_its_definition(
    rows: int, in_features: int, out_features: int, group: int, symmetric: bool, dtype: torch.dtype, backend: str
) -> None:
    x = _strided(rows, in_features, dtype)
    weight = ops.quantise_int4(torch.randn(out_features, in_features), group, symmetric=symmetric)
    out = ops.matmul_int4(x, *weight, group=group, backend=backend)
    exact = reference.matmul_int4(x.double(), *weight, group)
    assert_as_good_as_plain(out, exact, reference.matmul_int4(x, *weight, group))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_has_the_same_bits_in_any_batch(backend: str) -> None:
    x, weight = torch.randn(18, 128).bfloat16(), torch.randn(65, 128)
    int8, int4 = ops.quantise_int8(weight), ops.quantise_int4(weight, 64)
    whole8 = ops.matmul_int8(x, *int8, backend=backend)
    whole4 = ops.matmul_int4(x, *int4, group=64, backend=backend)
    for start, end in ((0, 1), (16, 18), (0, 10)):  # places as in test_matmul.py
        assert torch.equal(ops.matmul_int8(x[start:end], *int8, backend=backend), whole8[start:end])
        assert torch.equal(ops.matmul_int4(x[start:end], *int4, group=64, backend=backend), whole4[start:end])


def test_no_rows_and_no_inputs() -> None:
    for backend in BACKENDS:
        assert ops.matmul_int8(torch.zeros(0, 32), *ops.quantise_int8(torch.ones(3, 32)), backend=backend).shape == (
            0,
            3,
        )
        assert ops.matmul_int8(torch.zeros(2, 0), *ops.quantise_int8(torch.ones(3, 0)), backend=backend).eq(0).all()
        int4 = ops.quantise_int4(torch.ones(3, 32), 32)
        assert ops.matmul_int4(torch.zeros(0, 32), *int4, group=32, backend=backend).shape == (0, 3)


@pytest.mark.parametrize("kind", ["normal", "positive", "negative", "zeros", "tiny", "outlier"])
@pytest.mark.parametrize("group", [None, 32, 64, 128])
def test_what_quantising_loses(kind: str, group: int | None) -> None:
    weight = torch.randn(6, 256)
    weight = {
        "normal": weight,
        "positive": weight.abs() + 3,
        "negative": -weight.abs() - 3,
        "zeros": torch.zeros_like(weight),
        "tiny": weight * 1e-40,
        "outlier": weight.index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(1e4)),
    }[kind]

    def check(dequantised: Tensor, scales: Tensor, allowed: float) -> None:
        error = (dequantised - weight.double()).abs().view(*scales.shape, -1).amax(dim=-1)
        assert (error <= (allowed + 1e-5) * scales.double()).all()

    quantised, scales = ops.quantise_int8(weight, group)
    check(reference.dequantise_int8(quantised, scales, torch.float64), scales, 0.5)
    if group is None:
        return
    for symmetric, allowed in ((True, 0.5), (False, 1.0)):
        packed, scales, zeros = ops.quantise_int4(weight, group, symmetric=symmetric)
        check(reference.dequantise_int4(packed, scales, zeros, group, torch.float64), scales, allowed)


def test_the_order_of_nibbles() -> None:
    values = torch.randint(0, 16, (3, 128), dtype=torch.uint8)
    for group in GROUPS:
        packed = pack_int4(values, group)
        assert torch.equal(unpack_int4(packed, group), values)
        assert packed[1, 2] == values[1, 2] + 16 * values[1, 2 + group // 2]


def test_what_they_refuse() -> None:
    x = torch.zeros(2, 64)
    weight, scales = ops.quantise_int8(torch.zeros(3, 64))
    with pytest.raises(TypeError, match=r"weight: got torch.uint8; allowed: torch.int8"):
        ops.matmul_int8(x, weight.to(torch.uint8), scales)
    with pytest.raises(ValueError, match=r"scales: got 4 groups of 64 inputs; allowed"):
        ops.matmul_int8(x, weight, torch.zeros(3, 4))
    packed, scales, _ = ops.quantise_int4(torch.zeros(3, 64), 32)
    with pytest.raises(ValueError, match=r"group: got 48 for 64 inputs; allowed: 32, 64 or 128"):
        ops.matmul_int4(x, packed, scales, group=48)
    with pytest.raises(ValueError, match=r"scales: got shape \[3, 2\]; allowed: \[out=3, 1\]"):
        ops.matmul_int4(x, packed, scales, group=64)
    with pytest.raises(TypeError, match=r"zero_points: got torch.float32; allowed: torch.uint8"):
        ops.matmul_int4(x, packed, scales, scales, group=32)


def test_they_are_custom_operators() -> None:
    x, checks = torch.randn(2, 32), ("test_schema", "test_faketensor")
    torch.library.opcheck(ops._matmul_int8, (x, *ops.quantise_int8(torch.ones(3, 32))), test_utils=checks)
    torch.library.opcheck(ops._matmul_int4, (x, *ops.quantise_int4(torch.ones(3, 32), 32), 32), test_utils=checks)
