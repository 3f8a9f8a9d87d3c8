"""grammar_mask against its definition."""

from __future__ import annotations

import pytest
import torch

from nereid_kernels import grammar_mask as ops
from nereid_kernels.reference import grammar_mask as reference
from tests.kernels.triton_lang.devices import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "vocab"), [(5, 123), (1, 32), (0, 40), (2, 2100)])
def test_forbids_what_its_definition_forbids(rows: int, vocab: int, backend: str) -> None:
    logits = torch.randn(rows, vocab + 5)
    bitmask = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32), dtype=torch.int32)
    expected = logits.clone()
    reference.grammar_mask(expected[:, :vocab], bitmask)
    ops.grammar_mask(logits[:, :vocab], bitmask, backend=backend)
    assert torch.equal(logits, expected)  # and nothing past the vocabulary


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_masks_are_for_the_rows_that_are_named(index_dtype: torch.dtype, backend: str) -> None:
    logits = torch.randn(4, 70)
    bitmask = torch.randint(-(2**31), 2**31, (3, 3), dtype=torch.int32)
    row_indices = torch.tensor([3, -1, 1], dtype=index_dtype)
    expected = logits.clone()
    reference.grammar_mask(expected, bitmask, row_indices)
    ops.grammar_mask(logits, bitmask, row_indices, backend=backend)
    assert torch.equal(logits, expected)


def test_what_it_refuses() -> None:
    logits, bitmask = torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"bitmask: got shape \[2, 1\]; allowed: \[rows=2, 2\]"):
        ops.grammar_mask(logits, bitmask[:, :1])
    with pytest.raises(ValueError, match=r"row_indices: got shape \[3\]"):
        ops.grammar_mask(logits, bitmask, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"logits: got torch.float16; allowed: torch.float32"):
        ops.grammar_mask(logits.half(), bitmask)


def test_is_a_custom_operator() -> None:
    arguments = (torch.zeros(2, 40), torch.ones(2, 2, dtype=torch.int32), None)
    torch.library.opcheck(ops._grammar_mask, arguments, test_utils=("test_schema", "test_faketensor"))
