"""sample against its definition, by the kernel and on the CPU: the same tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nereid_kernels import sample as ops
from nereid_kernels.reference import sample as reference

# temperature, min_p, top_k, top_p
SETTINGS = [
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.05, 0, 1.0),
    (1.0, 0.0, 1, 1.0),
    (1.3, 0.0, 40, 1.0),
    (1.0, 0.0, 10**6, 0.9),
    (2.0, 0.01, 300, 0.95),
    (0.3, 0.0, 0, 0.999999),
    (5.0, 0.0, 7, 0.5),
    (1.0, 0.0, 0, 0.0),
    (100.0, 0.0, 0, 0.7),
    (1.0, 1.0, 0, 1.0),
]
Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def parameters(settings: list[tuple[float, float, int, float]], dtype: torch.dtype = torch.float64) -> Parameters:
    temperature, min_p, top_k, top_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    keys = torch.randint(-(2**63), 2**63 - 1, (len(settings),))
    return temperature.float(), min_p.to(dtype), top_k.int(), top_p.to(dtype), keys


def on_cpu(logits: Tensor, chosen: Parameters) -> tuple[list[int], list[bool]]:
    with torch.device("cpu"):
        tokens, sound = ops.sample(logits.cpu(), *(column.cpu() for column in chosen), backend="cpu")
    return tokens.tolist(), sound.tolist()


@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float64), (123, torch.float32), (1500, torch.float64)])
def test_draws_the_tokens_of_its_definition(vocab: int, dtype: torch.dtype) -> None:
    chosen = parameters(SETTINGS, dtype)
    logits = (4 * torch.randn(len(chosen[0]), vocab + 5))[:, :vocab]
    before = logits.clone()
    tokens, sound = ops.sample(logits, *chosen, backend="triton_lang")
    assert sound.all() and torch.equal(logits, before)
    assert tokens.tolist() == on_cpu(logits, chosen)[0] == reference.sample(logits, *chosen)[0].tolist()


@pytest.mark.parametrize("levels", [1, 3, 40])
def test_equal_scores_survive_a_bound_together(levels: int) -> None:
    chosen = parameters(SETTINGS)
    logits = torch.randint(0, levels, (len(chosen[0]), 300)).float()
    logits[torch.rand(logits.shape) < 0.3] = -math.inf  # banned
    tokens, sound = ops.sample(logits, *chosen, backend="triton_lang")
    assert sound.all() and tokens.tolist() == on_cpu(logits, chosen)[0]
    assert logits.gather(1, tokens[:, None]).isfinite().all()


def test_a_row_that_is_not_sound_is_named_and_costs_no_other() -> None:
    chosen = parameters([(1.0, 0.0, 5, 0.9)] * 4 + [(0.0, 0.0, 0, 1.0)])
    logits = torch.randn(5, 200)
    logits[0, 150], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    logits[4, [7, 190]] = 9.0
    tokens, sound = ops.sample(logits, *chosen, backend="triton_lang")
    assert sound.tolist() == on_cpu(logits, chosen)[1] == [False, False, False, True, True]
    assert tokens[:3].tolist() == [0, 0, 0] and tokens[4] == 7  # the lowest of equals
    assert tokens[3] == on_cpu(logits[3:4], tuple(p[3:4] for p in chosen))[0][0]  # type: ignore[arg-type]


def test_no_rows() -> None:
    chosen = parameters(SETTINGS[:1])
    none = [parameter[:0] for parameter in chosen]
    tokens, sound = ops.sample(torch.zeros(0, 10), *none, backend="triton_lang")
    assert tokens.shape == sound.shape == (0,)


def test_what_it_refuses() -> None:
    chosen = parameters(SETTINGS[:2])
    logits = torch.zeros(2, 10)
    with pytest.raises(ValueError, match=r"temperature: got shape \[2\]; allowed: \[rows=3\]"):
        ops.sample(torch.zeros(3, 10), *chosen)
    with pytest.raises(TypeError, match=r"keys: got torch.int32; allowed: torch.int64"):
        ops.sample(logits, *chosen[:4], chosen[4].int())
    with pytest.raises(ValueError, match=r"logits: got a vocabulary of 0"):
        ops.sample(logits[:, :0], *chosen)


def test_is_a_custom_operator() -> None:
    arguments = (torch.randn(2, 40), *parameters(SETTINGS[:2]))
    torch.library.opcheck(ops._sample, arguments, test_utils=("test_schema", "test_faketensor"))


def test_greedy_rows_alone_are_drawn_as_on_the_cpu() -> None:
    logits = torch.randint(0, 9, (4, 200)).float()
    logits[1, 7] = math.nan
    drawn, on_cpu = ops.greedy(logits, backend="triton_lang"), ops.greedy(logits.cpu(), backend="cpu")
    assert [x.tolist() for x in drawn] == [x.tolist() for x in on_cpu]
