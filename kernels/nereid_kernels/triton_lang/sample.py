"""The kernel of sample: one program a row, which it reads several times in tiles.

A bound is found by the digits of a number, not by a sort: the distance of a score to the best one is a float from 0 up,
whose bits are ordered like integers. Each pass over the row weighs the tokens by the next 4 bits of their distance, and
picks the value at which the wanted weight is reached: a count for top_k, a mass of probability for top_p. Sums are in
a fixed order, so a row gives the same token each time; masses are float64, as a bound must not depend on rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.draw_noise import GREEDY_TEMPERATURE
from nereid_kernels.launch import Launch, architecture_of, choose
from nereid_kernels.triton_lang.noise import race

_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def _sample(
    logits_ptr: tl.tensor,  # [rows, vocab]
    temperature_ptr: tl.tensor,  # [rows]
    min_p_ptr: tl.tensor,  # [rows]
    top_k_ptr: tl.tensor,  # [rows]
    top_p_ptr: tl.tensor,  # [rows]
    keys_ptr: tl.tensor,  # [rows]
    tokens_ptr: tl.tensor,  # [rows]
    sound_ptr: tl.tensor,  # [rows]
    logits_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    top, token, sound = _find_top(row_ptr, vocab, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if sound & (temperature >= _GREEDY_TEMPERATURE):
        min_p = tl.load(min_p_ptr + row).to(tl.float64)
        bound = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf")).to(tl.float32)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            kth = _find_bound(row_ptr, vocab, top, temperature, float("-inf"), top_k, False, BLOCK)
            bound = tl.maximum(bound, kth)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        if top_p < 1.0:
            wanted = top_p * _survivors_mass(row_ptr, vocab, top, temperature, bound, BLOCK)
            last = _find_bound(row_ptr, vocab, top, temperature, bound, wanted, True, BLOCK)
            bound = tl.maximum(bound, last)
        token = _draw(row_ptr, vocab, top, temperature, bound, tl.load(keys_ptr + row), token, BLOCK)
    tl.store(tokens_ptr + row, tl.where(sound, token, 0).to(tl.int64))
    tl.store(sound_ptr + row, sound)


@triton.jit
def _find_top(row_ptr: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """(largest logit, its lowest id, whether it is finite and none is NaN)"""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf"))
        has_nan |= (logits != logits).to(tl.int32)
        better = logits > best
        best = tl.where(better, logits, best)
        best_ids = tl.where(better, tokens, best_ids)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_ids, 0x7FFFFFFF), axis=0)
    return top, token, (tl.max(has_nan, axis=0) == 0) & (tl.abs(top) < float("inf"))


@triton.jit
def _scores(
    row_ptr: tl.tensor, tokens: tl.tensor, vocab: tl.tensor, top: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """[BLOCK] float32, at most 0; -inf past the vocabulary. Divided as IEEE 754 has it: the CPU gets the same bits."""
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf"))
    return tl.div_rn(logits - top, temperature)


@triton.jit
def _survivors_mass(
    row_ptr: tl.tensor, vocab: tl.tensor, top: tl.tensor, temperature: tl.tensor, bound: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The sum of exp(score) over the scores not below bound, float64."""
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, BLOCK):
        scores = _scores(row_ptr, start + tl.arange(0, BLOCK), vocab, top, temperature)
        if tl.max(scores, axis=0) >= bound:
            mass += tl.sum(tl.where(scores >= bound, tl.exp(scores.to(tl.float64)), 0.0), axis=0)
    return mass


@triton.jit
def _find_bound(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    wanted: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """A bound such that the scores not below it are the fewest best ones (ties included) that reach `wanted`.

    Scores below `floor` are out of the question.  wanted: a count, or with BY_MASS a mass, float64.
    """
    digits = tl.arange(0, 16)
    weight_type: tl.constexpr = tl.float64 if BY_MASS else tl.int32
    settled = tl.zeros([], weight_type)  # the weight of all distances below `distance`
    distance = tl.zeros([], tl.int32)  # bits found so far
    shift = 28
    while shift >= 0:
        counts = tl.zeros([16], tl.int32)
        weights = tl.zeros([16], weight_type)
        for start in range(0, vocab, BLOCK):
            scores = _scores(row_ptr, start + tl.arange(0, BLOCK), vocab, top, temperature)
            digit = (tl.abs(scores).to(tl.int32, bitcast=True) - distance) >> shift
            inside = (digit >= 0) & (digit < 16) & (scores >= floor)
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                chosen = inside[None, :] & (digit[None, :] == digits[:, None])  # [16, BLOCK]
                counts += tl.sum(chosen.to(tl.int32), axis=1)
                if BY_MASS:
                    mass = tl.exp(scores.to(tl.float64))
                    weights += tl.sum(tl.where(chosen, mass[None, :], 0.0), axis=1)
        if not BY_MASS:
            weights = counts
        reached = settled + tl.cumsum(weights, axis=0)
        # Rounding must not lead past the last token.
        digit_found = tl.minimum(
            tl.sum((reached < wanted).to(tl.int32), axis=0), tl.max(tl.where(counts > 0, digits, 0), axis=0)
        )
        settled = tl.max(tl.where(digits < digit_found, reached, settled), axis=0)
        distance += digit_found << shift
        if tl.sum(tl.where(digits == digit_found, counts, 0), axis=0) == 1:
            distance += (1 << shift) - 1  # one token: no need to know its lower bits
            shift = 0
        shift -= 4
    return -distance.to(tl.float32, bitcast=True)


@triton.jit
def _draw(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    bound: tl.tensor,
    key: tl.tensor,
    token: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token that wins among the scores not below bound; `token` where there are none."""
    best = tl.full([], float("-inf"), tl.float64)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        scores = _scores(row_ptr, tokens, vocab, top, temperature)
        if tl.max(scores, axis=0) >= bound:
            best, token = race(best, token, tl.where(scores >= bound, scores, float("-inf")), tokens, key)
    return token


def launch_sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    tokens: Tensor,
    sound: Tensor,
    architecture: str | None = None,
) -> Launch:
    """logits: [rows, vocab].  The others: [rows].  architecture: as in `launch_rms_norm`."""
    rows, vocab = logits.shape
    config = choose("sample", architecture or architecture_of(logits.device), size=vocab)
    arguments = {
        "logits_ptr": logits,
        "temperature_ptr": temperature,
        "min_p_ptr": min_p,
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "keys_ptr": keys,
        "tokens_ptr": tokens,
        "sound_ptr": sound,
        "logits_stride": logits.stride(0),
        "vocab": vocab,
        **config.tiles,
    }
    return Launch(_sample, (rows,), arguments, config.num_warps, config.num_stages)
