"""penalties against their definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from nereid_kernels import penalties as ops
from nereid_kernels.reference import penalties as reference
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.triton_lang.devices import BACKENDS


def penalty_arguments(rows: int, vocab: int) -> tuple[Tensor, ...]:
    counts = torch.randint(0, 4, (rows, vocab), dtype=torch.int32) * (torch.rand(rows, vocab) < 0.3)
    prompt_mask = torch.rand(rows, vocab) < 0.2
    repetition, frequency, presence = 0.5 + torch.rand(rows), torch.randn(rows), torch.randn(rows)
    return counts.int(), prompt_mask, repetition, frequency, presence


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "vocab"), [(5, 123), (1, 1), (0, 40), (2, 2100)])
def test_penalties_equal_their_definition(rows: int, vocab: int, backend: str) -> None:
    wide = torch.randn(rows, vocab + 5)
    logits, arguments = wide[:, :vocab], penalty_arguments(rows, vocab)
    exact, plain, rest = logits.double(), logits.clone(), wide[:, vocab:].clone()
    reference.apply_penalties(exact, *(a.double() if a.is_floating_point() else a for a in arguments))
    reference.apply_penalties(plain, *arguments)
    ops.apply_penalties(logits, *arguments, backend=backend)
    assert_as_good_as_plain(logits, exact, plain)
    assert torch.equal(wide[:, vocab:], rest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_penalty_by_hand(backend: str) -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -math.inf]]).repeat(4, 1)
    counts = torch.tensor([[3, 0, 0, 1]], dtype=torch.int32).repeat(4, 1)
    prompt_mask = torch.tensor([[False, True, False, False]]).repeat(4, 1)
    repetition, frequency, presence = torch.tensor([[2.0, 1, 1, 1], [0, 0.5, 0, 0], [0, 0, 0.25, 0]])
    ops.apply_penalties(logits, counts, prompt_mask, repetition, frequency, presence, backend=backend)
    expected = torch.tensor([[1.0, -4, 2], [0.5, -2, 2], [1.75, -2, 2], [2, -2, 2]])
    assert torch.equal(logits[:, :3], expected) and logits[:, 3].eq(-math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[3, 0, 300], [0, 0, 0]])
def test_bias_equals_its_definition(lengths: list[int], backend: str) -> None:
    logits = torch.randn(3, 500)
    bias_rows = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    bias_ids = torch.cat([torch.randperm(500)[:length] for length in lengths]).int()
    bias_values = torch.randn(sum(lengths)).masked_fill(torch.rand(sum(lengths)) < 0.3, -math.inf)
    expected = logits.clone()
    reference.apply_bias(expected, bias_rows, bias_ids, bias_values)
    ops.apply_bias(logits, bias_rows, bias_ids, bias_values, backend=backend)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_listed_twice_gets_both_biases(backend: str) -> None:
    logits = torch.zeros(1, 4)
    bias_rows, bias_ids = torch.tensor([0, 4]).int(), torch.tensor([1, 2, 2, 1]).int()
    ops.apply_bias(logits, bias_rows, bias_ids, torch.tensor([4.0, 1, 0.5, -math.inf]), backend=backend)
    assert logits.tolist() == [[0.0, -math.inf, 1.5, 0.0]]


def test_what_they_refuse() -> None:
    logits, arguments = torch.zeros(2, 40), penalty_arguments(2, 40)
    with pytest.raises(ValueError, match=r"output_counts: got shape \[2, 39\]; allowed: \[rows=2, vocab=40\]"):
        ops.apply_penalties(logits, arguments[0][:, 1:], *arguments[1:])
    with pytest.raises(TypeError, match=r"prompt_mask: got torch.int32; allowed: torch.bool"):
        ops.apply_penalties(logits, arguments[0], arguments[1].int(), *arguments[2:])
    with pytest.raises(ValueError, match=r"bias_rows: got shape \[2\]; allowed: \[3\]"):
        ops.apply_bias(logits, torch.zeros(2).int(), torch.zeros(1).int(), torch.zeros(1))


def test_are_custom_operators() -> None:
    utilities = ("test_schema", "test_faketensor")
    logits = torch.randn(2, 40)
    torch.library.opcheck(ops._apply_penalties, (logits, *penalty_arguments(2, 40)), test_utils=utilities)
    bias = torch.tensor([0, 1, 2]).int(), torch.tensor([3, 4]).int(), torch.tensor([1.0, -1.0])
    torch.library.opcheck(ops._apply_bias, (logits, *bias), test_utils=utilities)
