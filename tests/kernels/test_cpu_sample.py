"""sample on the CPU against its definition, where a row is wider than the blocks that are looked at first.

(Against the kernel, and in narrow rows: triton_lang/test_sample.py.)
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from nereid_kernels import sample as ops
from nereid_kernels.reference import sample as reference

Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_parameters(rng: random.Random, rows: int, vocab: int) -> Parameters:
    def column(choices: list[float]) -> list[float]:
        return [rng.choice(choices) for _ in range(rows)]

    return (
        torch.tensor(column([0.0, -0.0, 1e-10, 1e-5, 1e-3, 0.3, 1.0, 1.0, 2.0, 50.0, 1e4])),
        torch.tensor(column([0.0, 0.0, 0.0, 0.01, 0.3, 1.0]), dtype=torch.float64),
        torch.tensor(column([-1, 0, 0, 1, 2, 50, 79, 80, 81, 319, 320, 1000, vocab, vocab + 1]), dtype=torch.int32),
        torch.tensor(column([0.0, 1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 0.999999, 1 - 1e-12]), dtype=torch.float64),
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
    )


def some_logits(kind: str, rows: int, vocab: int) -> Tensor:
    scale = torch.tensor([0.01, 1.0, 4.0, 30.0]).repeat(rows)[:rows, None]
    if kind == "apart":
        return torch.randn(rows, vocab + 3)[:, :vocab] * scale
    if kind == "equal":
        return torch.zeros(rows, vocab)
    if kind == "ties":
        return torch.randint(0, 20, (rows, vocab)).float()
    logits = (torch.randn(rows, vocab) * scale).masked_fill(torch.rand(rows, vocab) < 0.97, -math.inf)
    logits[:, vocab // 2] = 0.5
    return logits


@pytest.mark.parametrize("kind", ["apart", "equal", "ties", "banned"])
@pytest.mark.parametrize("vocab", [2560, 2561, 2591, 8000])
def test_draws_the_tokens_of_its_definition(kind: str, vocab: int) -> None:
    torch.manual_seed(vocab)
    rng = random.Random(vocab)
    for _ in range(4):
        logits, chosen = some_logits(kind, 16, vocab), random_parameters(rng, 16, vocab)
        before = logits.clone()
        tokens, sound = ops.sample(logits, *chosen)
        assert sound.all() and torch.equal(logits, before)
        assert tokens.tolist() == reference.sample(logits, *chosen)[0].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 50.0])
def test_any_token_of_a_wide_row_can_win(temperature: float) -> None:
    """Without truncation, where most winners lie outside the best blocks."""
    torch.manual_seed(1)
    rows, vocab = 150, 8000
    off, logits = torch.zeros(rows), torch.randn(rows, vocab)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,))
    chosen = (off + temperature, off.double(), off.int(), off.double() + 1, keys)
    assert ops.sample(logits, *chosen)[0].tolist() == reference.sample(logits, *chosen)[0].tolist()


@pytest.mark.parametrize("offset", [-1e-9, 1e-9])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_mass_that_is_just_reached_is_told_from_one_that_is_not(count: int, offset: float) -> None:
    """By less than a sum in float32 can tell, in rows whose best blocks do not hold all that survives."""
    torch.manual_seed(count)
    rows, vocab = 200, 8000
    logits = (torch.randn(vocab) * 2).expand(rows, -1).contiguous()
    ordered = (logits[0] - logits[0].max()).sort(descending=True)
    mass = ordered.values.double().exp().cumsum(0)
    top_p = torch.full((rows,), float(mass[count - 1] / mass[-1]) + offset, dtype=torch.float64)
    off = torch.zeros(rows)
    chosen = (off + 1.0, off.double(), off.int(), top_p, torch.randint(-(2**63), 2**63 - 1, (rows,)))
    tokens = ops.sample(logits, *chosen)[0].tolist()
    assert set(tokens) == set(ordered.indices[: count + (offset > 0)].tolist())
    assert tokens == reference.sample(logits, *chosen)[0].tolist()


def test_a_wide_row_that_is_not_sound_costs_no_other() -> None:
    torch.manual_seed(0)
    logits, chosen = torch.randn(4, 6000), random_parameters(random.Random(1), 4, 6000)
    logits[1, 5990], logits[2, 3] = math.nan, math.inf
    tokens, sound = ops.sample(logits, *chosen)
    assert sound.tolist() == [True, False, False, True] and tokens[1:3].tolist() == [0, 0]
    for row in (0, 3):
        alone = ops.sample(logits[row : row + 1], *(column[row : row + 1] for column in chosen))
        assert int(alone[0]) == int(tokens[row])


@pytest.mark.parametrize("vocab", [1, 31, 2561, 49152])
def test_greedy_rows_alone_are_drawn_as_they_are_among_others(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(12, vocab + 3)[:, :vocab]
    logits[3], logits[4] = torch.randint(0, 5, (2, vocab)).float()  # ties
    for row, value in ((5, math.nan), (6, math.inf), (7, -math.inf)):
        logits[row, vocab // 2] = value
    logits[8], logits[9, -1], logits[10, 0], logits[10, -1] = -math.inf, math.nan, math.inf, math.nan
    before, off = logits.clone(), torch.zeros(12)
    tokens, sound = ops.greedy(logits)
    assert torch.equal(logits.isnan(), before.isnan()) and torch.equal(logits.nan_to_num(), before.nan_to_num())
    among = ops.sample(logits, off, off, off.int(), off, off.long())
    assert tokens.tolist() == among[0].tolist() and sound.tolist() == among[1].tolist()
    assert sound[:5].all() and not sound[[5, 6, 8, 9, 10]].any()
