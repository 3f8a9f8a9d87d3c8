"""The sampler: forced outcomes, distributions, and that a row depends on nothing but itself."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nereid.sampling.noise import noise_key
from nereid.sampling.sampler import SamplingRow, sample
from nereid_kernels.draw_noise import gumbel, uniform

VOCAB = 1000


MASK = (1 << 64) - 1


def row(key: int = 0, **changes: object) -> SamplingRow:
    settings: dict[str, object] = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    return SamplingRow(**{**settings, **changes}, key=key)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, *rows: SamplingRow) -> list[int]:
    tokens, sound = sample(logits.clone(), rows)
    assert all(sound)
    return tokens


def survivors(logits: torch.Tensor, draws: int = 3000, **changes: object) -> set[int]:
    """Every token that is drawn from one row of logits in `draws` draws."""
    rows = [row(noise_key(7, 0, i), **changes) for i in range(draws)]
    return set(draw(logits.expand(draws, -1), *rows))


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [500, 400]] = 3.0
    assert draw(logits, row(temperature=0.0), row(temperature=0.0)) == [0, 400]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-300, 1e-10, 1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * 10
    rows = [row(noise_key(3, 0, i), temperature=temperature) for i in range(64)]
    gap = logits.topk(2).values.diff()[:, 0].neg()
    expected = logits.argmax(1).tolist()
    assert [t for t, g in zip(draw(logits, *rows), gap, strict=True) if g > 0.1] == [
        e for e, g in zip(expected, gap, strict=True) if g > 0.1
    ]


@pytest.mark.parametrize("temperature", [1e-10, 1e-5, 0.3, 2.0, 1e4, 1e6])
def test_no_temperature_gives_an_id_outside_the_vocabulary(temperature: float) -> None:
    logits = torch.randn(32, VOCAB) * 100
    assert all(0 <= t < VOCAB for t in draw(logits, *[row(i, temperature=temperature) for i in range(32)]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -0.5, 0.3, 1.5, -3.0]])
    count = 40_000
    rows = [row(noise_key(i, 0, 5), temperature=temperature) for i in range(count)]
    seen = torch.bincount(torch.tensor(draw(logits.expand(count, -1), *rows)), minlength=8).double()
    expected = (logits[0].double() / temperature).softmax(0) * count
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 29.9  # 7 degrees of freedom, p = 1e-4


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = torch.randn(VOCAB) * 0.1
    order = logits.argsort(descending=True).tolist()
    assert survivors(logits, top_k=1) == {order[0]}
    assert survivors(logits, top_k=5) == set(order[:5])
    assert survivors(logits, draws=20_000, top_k=400) <= set(order[:400])


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    assert survivors(logits, top_p=0.0) == {0}
    assert survivors(logits, top_p=0.39) == {0}
    assert survivors(logits, top_p=0.41) == {0, 1}
    assert survivors(logits, top_p=0.89) == {0, 1, 2}
    assert survivors(logits, top_p=1.0) == {0, 1, 2, 3, 4}


def test_top_p_over_a_flat_vocabulary_reaches_past_the_first_candidates() -> None:
    logits = torch.linspace(1e-3, 0.0, VOCAB)
    kept = survivors(logits, draws=30_000, top_p=0.5)
    assert max(kept) <= VOCAB // 2 and len(kept) > 490


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert survivors(logits, top_k=2, top_p=0.5) == {0}  # 0.4 of 0.7


def test_min_p_is_a_share_of_the_largest() -> None:
    logits = torch.tensor([0.5, 0.24, 0.26]).log()
    assert survivors(logits, min_p=0.5) == {0, 2}
    assert survivors(logits, min_p=1.0) == {0}


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 10**18])
def test_top_k_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    logits = torch.randn(1, VOCAB)
    assert [draw(logits, row(i, top_k=top_k)) for i in range(50)] == [draw(logits, row(i)) for i in range(50)]


def test_a_row_is_drawn_alike_alone_and_in_any_batch() -> None:
    rng = random.Random(4)
    logits = torch.randn(48, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    rows = [
        row(
            rng.getrandbits(62),
            temperature=rng.choice([0.0, 1e-6, 0.7, 1.0, 50.0]),
            top_k=rng.choice([-1, 0, 1, 3, 64, 300, VOCAB + 1]),
            top_p=rng.choice([0.0, 0.3, 0.95, 1.0]),
            min_p=rng.choice([0.0, 0.1, 1.0]),
        )
        for _ in range(48)
    ]
    alone = [draw(logits[i : i + 1], rows[i])[0] for i in range(48)]
    assert draw(logits, *rows) == alone


def test_banned_tokens_are_never_drawn_and_their_neighbours_stay_bit_equal() -> None:
    logits = torch.zeros(3, 4)
    before = logits.clone()
    tokens, _ = sample(logits, [row(1), row(2, banned=(0, 1, 3)), row(3, temperature=0.0, banned=(0,))])
    assert tokens[1:] == [2, 1]
    assert torch.equal(logits[0], before[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_drawn(poison: float) -> None:
    logits = torch.randn(3, VOCAB)
    expected = draw(logits, row(1), row(2), row(3))
    logits[1, 17] = poison
    tokens, sound = sample(logits, [row(1), row(2), row(3)])
    assert sound == [True, False, True]
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


def test_noise_is_a_function_of_key_and_token_and_looks_like_gumbel() -> None:
    ids = torch.arange(200_000)
    noise = gumbel(torch.tensor([[noise_key(1, 0, 0)]]), ids)[0]
    assert torch.equal(noise[123:456], gumbel(torch.tensor([[noise_key(1, 0, 0)]]), ids[123:456])[0])
    assert abs(float(noise.mean()) - 0.57722) < 0.01 and abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    keys = {noise_key(s, q, p) for s in range(20) for q in range(5) for p in range(50)}
    assert len(keys) == 20 * 5 * 50


def test_noise_is_finite_at_both_ends_of_its_range() -> None:
    """Of the 64 bits, all ones and all zeros: found by running the hash backwards from them."""
    low, high = uniform(*inverse_of(0)), uniform(*inverse_of(-1))
    assert 0 < low < 1e-15 and 1 - 1e-15 < high < 1
    assert gumbel(*inverse_of(-1)).isfinite() and gumbel(*inverse_of(0)).isfinite()


def inverse_of(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a token id whose hash is `bits`."""
    value = bits & MASK
    for shift, multiplier in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = value
        for _ in range(64 // shift):
            shifted = value ^ (shifted >> shift)
        value = shifted * pow(multiplier, -1, 1 << 64) & MASK
    return torch.tensor(value - (1 << 64) if value >> 63 else value), torch.tensor(0)
