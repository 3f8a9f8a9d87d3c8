"""The noise that tokens are drawn with, a pure function of (key, token id): SplitMix64 (Steele, Lea and Flood 2014) in
int64. Every implementation of a draw has this noise, bit for bit.

The number of id -1, which no token has, is free for decisions that are no draw of a token; so are those below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a temperature is greedy: every gap between two logits of a model is larger than its noise.
GREEDY_TEMPERATURE = 1e-5
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Float64 in (0, 1), both ends excluded, of the shape that keys and token_ids, both int64, broadcast to."""
    bits = _all_but_last_mixing(keys, token_ids)
    bits ^= _shift_right(bits, 31)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52  # of 52 bits, so that the sum is exact


def distance_from_one(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Float32, 2**31 * (1 - uniform(keys, token_ids)) less something from 0 to 2, but for float32's rounding."""
    bits = _all_but_last_mixing(keys, token_ids)  # the last changes at most the lowest of the upper 32 bits
    return bits.bitwise_not_().bitwise_right_shift_(33).bitwise_and_((1 << 31) - 1).float().sub_(1.0)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64: argmax(log p + noise) is a draw from p (Gumbel 1954, Maddison et al. 2014)."""
    return -torch.log(-torch.log(uniform(keys, token_ids)))


def _all_but_last_mixing(keys: Tensor, token_ids: Tensor) -> Tensor:
    bits = keys + token_ids * _STRIDE
    for shift, multiplier in _ROUNDS:
        bits ^= _shift_right(bits, shift)
        bits *= multiplier
    return bits


def _shift_right(bits: Tensor, shift: int) -> Tensor:
    return (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)  # torch shifts copies of the sign in
