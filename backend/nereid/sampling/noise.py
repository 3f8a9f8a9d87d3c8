"""Gumbel noise as a pure function of (seed, sequence index, position, token id). Owns nothing, keeps no state.

A request's noise therefore does not depend on its batch, on what was drawn before, or on preemption. Integer hashing
(the finaliser of SplitMix64; Steele, Lea and Flood 2014) in int64, which wraps alike on every device.
"""

from __future__ import annotations

import torch

_MASK_64 = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd: 2**64 over the golden ratio
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def noise_key(seed: int, sequence_index: int, position: int) -> int:
    """The key of one row, as a signed 64-bit integer."""
    key = 0
    for part in (seed, sequence_index, position):
        key = _mix(key ^ _mix((part + _STRIDE) & _MASK_64))
    return _signed(key)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of the shape that keys [rows, 1] and token_ids [rows or 1, n] broadcast to."""
    bits = keys + token_ids * _signed(_STRIDE)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits = (bits ^ _shift_right(bits, shift)) * _signed(multiplier)
    bits = bits ^ _shift_right(bits, 31)
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53  # in (0, 1), both ends excluded
    return -torch.log(-torch.log(uniform))


def _mix(value: int) -> int:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(values: torch.Tensor, shift: int) -> torch.Tensor:
    # Torch shifts arithmetically: the copies of the sign are masked away.
    return (values >> shift) & ((1 << (64 - shift)) - 1)
