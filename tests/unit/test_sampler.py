"""The sampler: forced outcomes, distributions, and that a row depends on nothing but itself."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nereid.batch import DrawFault, GuideMasks
from nereid.request import Guide, GuideKind, SamplingParams
from nereid.sampling.noise import noise_key
from nereid_kernels.draw_noise import distance_from_one, gumbel, uniform
from tests.unit.draws import EOS, Draws

VOCAB = 1000


MASK = (1 << 64) - 1


def row(seed: int = 0, **changes: object) -> SamplingParams:
    return SamplingParams(seed=seed, **changes)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, *rows: SamplingParams) -> list[int]:
    return Draws(logits.shape[1], *rows).tokens(logits)


def survivors(logits: torch.Tensor, draws: int = 3000, **changes: object) -> set[int]:
    """Every token that is drawn from one row of logits in `draws` draws."""
    return set(draw(logits.expand(draws, -1), *[row(i, **changes) for i in range(draws)]))


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [500, 400]] = 3.0
    assert draw(logits, row(temperature=0.0), row(temperature=0.0)) == [0, 400]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-300, 1e-10, 1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * 10
    rows = [row(i, temperature=temperature) for i in range(64)]
    gap = logits.topk(2).values.diff()[:, 0].neg()
    expected = logits.argmax(1).tolist()
    assert [t for t, g in zip(draw(logits, *rows), gap, strict=True) if g > 0.1] == [
        e for e, g in zip(expected, gap, strict=True) if g > 0.1
    ]


@pytest.mark.parametrize("temperature", [-0.0, 1e-10, 1e-5, 0.3, 2.0, 1e4, 1e6])
def test_no_temperature_gives_an_id_outside_the_vocabulary(temperature: float) -> None:
    logits = torch.randn(32, VOCAB) * 100
    assert all(0 <= t < VOCAB for t in draw(logits, *[row(i, temperature=temperature) for i in range(32)]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -0.5, 0.3, 1.5, -3.0]])
    count = 20_000
    rows = [row(i, temperature=temperature) for i in range(count)]
    seen = torch.bincount(torch.tensor(draw(logits.expand(count, -1), *rows)), minlength=8).double()
    expected = (logits[0].double() / temperature).softmax(0) * count
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 29.9  # 7 degrees of freedom, p = 1e-4


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = torch.randn(VOCAB) * 0.1
    order = logits.argsort(descending=True).tolist()
    assert survivors(logits, top_k=1) == {order[0]}
    assert survivors(logits, top_k=5) == set(order[:5])
    assert survivors(logits, draws=5000, top_k=400) <= set(order[:400])


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    assert survivors(logits, top_p=0.0) == {0}
    assert survivors(logits, top_p=0.39) == {0}
    assert survivors(logits, top_p=0.41) == {0, 1}
    assert survivors(logits, top_p=0.89) == {0, 1, 2}
    assert survivors(logits, top_p=1.0) == {0, 1, 2, 3, 4}


def test_top_p_over_a_flat_vocabulary_reaches_past_the_first_candidates() -> None:
    logits = torch.linspace(1e-3, 0.0, VOCAB)
    kept = survivors(logits, draws=6000, top_p=0.5)
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


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": [1e-10, 1e-5, 0.0, -0.0, 2.0, 1e4]},
        {"top_k": [-1, 0, 1, 64, VOCAB, VOCAB + 1]},
        {"top_p": [0.0, 1.0, 1e-12, 0.5, 0.999999, 1 - 1e-12]},
        {"min_p": [0.0, 1.0, 1e-9, 0.2, 0.0, 0.9]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_ends_of_each_parameter_in_one_batch_equal_their_solo_runs(changes: dict[str, list[float]]) -> None:
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    ((name, values),) = changes.items()
    rows = [row(i, **{name: values[i % 6]}) for i in range(60)]
    assert draw(logits, *rows) == [draw(logits[i : i + 1], rows[i])[0] for i in range(60)]


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
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            frequency_penalty=rng.choice([0.0, 0.7]),
            logprobs=rng.choice([None, 0, 3]),
        )
        for _ in range(48)
    ]
    together = Draws(VOCAB, *rows, prompt=(1, 2, 3))
    alone = [Draws(VOCAB, params, prompt=(1, 2, 3)) for params in rows]
    for _ in range(3):
        expected = [draws.next(logits[i : i + 1])[0] for i, draws in enumerate(alone)]
        assert [replace(token, request_id=0) for token in together.next(logits)] == expected


def test_the_logits_of_a_row_without_rules_are_not_written() -> None:
    logits = torch.randn(3, 40)
    before = logits.clone()
    changed = row(repetition_penalty=1.3, logit_bias=((3, 2.0),), bad_words=((4,),), allowed_token_ids=(3, 4, 5))
    Draws(40, row(), changed, row(), prompt=(1, 2)).next(logits, copy=False)
    assert torch.equal(logits[[0, 2]], before[[0, 2]]) and not torch.equal(logits[1], before[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_drawn(poison: float) -> None:
    logits = torch.randn(4, VOCAB)
    rows = [row(1), row(2), row(3), row(4, allowed_token_ids=(5,))]
    expected = draw(logits, *rows)
    logits[1, 17] = logits[3, 17] = poison  # in row 3 a mask covers it
    tokens = Draws(VOCAB, *rows).next(logits)
    fault = DrawFault.NOT_FINITE
    assert [token.fault for token in tokens] == [None, fault, None, fault]
    assert (tokens[0].token_id, tokens[2].token_id) == (expected[0], expected[2])


def test_a_row_whose_masks_leave_no_token_says_so() -> None:
    rows = (row(allowed_token_ids=(7,), bad_words=((7,),)), row(allowed_token_ids=()), row())
    tokens = Draws(40, *rows).next(torch.randn(3, 40))
    assert [token.fault for token in tokens] == [DrawFault.NONE_LEFT, DrawFault.NONE_LEFT, None]


def test_min_tokens_bans_what_stops_until_there_are_enough() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0, 7.0, 6.0]])  # 2 and 3 end a sequence
    assert EOS == (2, 3)
    stopping, ignoring = row(temperature=0.0, min_tokens=2, stop_token_ids=(4,)), row(temperature=0.0, min_tokens=2)
    draws = Draws(6, stopping, replace(ignoring, ignore_eos=True), row(temperature=0.0), prompt=(5, 5, 5, 5))
    three = [draws.tokens(logits.expand(3, -1)) for _ in range(3)]
    assert three == [[5, 2, 2], [5, 2, 2], [2, 2, 2]]


def test_bad_words_are_banned_where_they_would_become_whole() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0]])
    words = ((4,), (5, 6), (1, 5, 5, 7))
    draws = Draws(8, row(temperature=0.0, bad_words=words), prompt=(1,))
    assert [draws.tokens(logits)[0] for _ in range(2)] == [5, 5]
    draws.force(1, 5, 5)
    assert draws.tokens(logits) == [5]  # after 5, not 6
    assert Draws(8, row(temperature=0.0, bad_words=((1, 4),)), prompt=(1,)).tokens(logits) == [5]  # begun by the prompt
    assert Draws(8, row(temperature=0.0, bad_words=((2, 1, 4),)), prompt=(1,)).tokens(logits) == [4]


def test_allowed_tokens_alone_are_drawn_with_their_own_shares() -> None:
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    draws = 4000
    seen = torch.bincount(
        torch.tensor(draw(logits.expand(draws, -1), *[row(i, allowed_token_ids=(1, 3, 99)) for i in range(draws)])),
        minlength=4,
    ).double()
    assert seen[[0, 2]].sum() == 0
    assert abs(float(seen[1]) / draws - 2 / 3) < 4 * math.sqrt(2 / 9 / draws)


def test_a_bias_adds_to_a_logit() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    draws, bias = 4000, ((3, math.log(4.0)), (0, -math.inf), (77, 5.0))
    seen = torch.bincount(
        torch.tensor(draw(logits.expand(draws, -1), *[row(i, logit_bias=bias) for i in range(draws)])), minlength=4
    ).double()
    expected = torch.tensor([0.0, 0.3, 0.2, 0.4], dtype=torch.float64) / 0.9 * draws
    assert seen[0] == 0 and float(((seen - expected)[1:] ** 2 / expected[1:]).sum()) < 18.4  # 2 degrees, p = 1e-4


def test_a_guide_masks_its_own_row_and_only_guided_rows_wait_for_masks() -> None:
    logits = torch.randn(3, 70)
    guided = row(temperature=0.0, guide=Guide(GuideKind.REGEX, "x"))
    draws = Draws(70, row(temperature=0.0), guided, row(temperature=0.0))
    words = [0, 1 << 9, 0]  # token 41
    bitmask = torch.tensor(words, dtype=torch.int32).numpy().tobytes()
    tokens = draws.tokens(logits, GuideMasks(1, (1,), bitmask))
    best = logits.argmax(dim=1).tolist()
    assert tokens == [best[0], 41, best[2]]


def test_penalties_equal_a_plain_reference_over_many_steps() -> None:
    """Repetition: Hugging Face's own processor, of prompt and output; frequency and presence: of the output."""
    generator = torch.Generator().manual_seed(3)
    settings = [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.6, 0.0), (1.0, 0.0, 1.5), (1.2, -0.4, 0.3), (1.0, 0.0, 0.0)]
    rows = [
        row(i, temperature=0.0, repetition_penalty=r, frequency_penalty=f, presence_penalty=p)
        for i, (r, f, p) in enumerate(settings)
    ]
    prompt = (3, 3, 7, 9, 50_000)  # the last lies outside
    draws = Draws(12, *rows, prompt=prompt)
    for _ in range(30):
        logits = torch.randn(len(rows), 12, generator=generator) * 2
        expected = []
        for index, (repetition, frequency, presence) in enumerate(settings):
            tokens, output = draws.token_ids[index], draws.token_ids[index][len(prompt) :]
            seen = torch.tensor([[token for token in tokens if token < 12]])
            own = RepetitionPenaltyLogitsProcessor(repetition)(seen, logits[index : index + 1].clone())[0]
            counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=12)
            expected.append(int((own - frequency * counts - presence * (counts > 0)).argmax()))
        assert draws.tokens(logits) == expected


def test_a_slot_of_penalties_is_clean_for_the_next_request() -> None:
    draws = Draws(40, row(temperature=0.0, frequency_penalty=9.0))
    draws.force(*range(10, 20))
    draws.replace(row(temperature=0.0, frequency_penalty=1.0), prompt=(0,))
    logits = torch.zeros(1, 40)
    logits[0, 5], logits[0, 6], logits[0, 10] = 3.0, 1.5, 1.8
    # 3 -> 2 -> 1: once 5 was drawn twice, 10 is next, which only the request before had drawn.
    assert [draws.tokens(logits)[0] for _ in range(3)] == [5, 5, 10]


def test_noise_is_a_function_of_key_and_token_and_looks_like_gumbel() -> None:
    ids = torch.arange(200_000)
    noise = gumbel(torch.tensor([[noise_key(1, 0, 0)]]), ids)[0]
    assert torch.equal(noise[123:456], gumbel(torch.tensor([[noise_key(1, 0, 0)]]), ids[123:456])[0])
    assert abs(float(noise.mean()) - 0.57722) < 0.01 and abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    keys = {noise_key(s, q, p) for s in range(20) for q in range(5) for p in range(50)}
    assert len(keys) == 20 * 5 * 50


def test_the_distance_of_a_number_from_one_is_told_without_its_last_mixing() -> None:
    keys, ids = torch.randint(-(2**63), 2**63 - 1, (50, 1)), torch.arange(20_000)
    less = 2**31 * (1 - uniform(keys, ids)) - distance_from_one(keys, ids).double()
    assert float(less.min()) > -128 and float(less.max()) < 130  # float32 has 24 bits of the 31
    small = uniform(keys, ids) > 1 - 2**-10
    assert small.sum() > 500 and float(less[small].min()) >= 0 and float(less[small].max()) <= 2


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
