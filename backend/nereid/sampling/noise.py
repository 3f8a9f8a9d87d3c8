"""The key of a row's noise, a pure function of (seed, sequence index, position). Owns nothing, keeps no state.

With the token id it decides the noise (`nereid_kernels.draw_noise`), which therefore does not depend on a
request's batch, on what was drawn before, or on preemption. Hashed by the finaliser of SplitMix64 (Steele, Lea and
Flood 2014).
"""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd: 2**64 over the golden ratio
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def sequence_key(seed: int, sequence_index: int) -> int:
    """What the keys of all positions of one sequence begin with: 64 bits without a sign."""
    return _join(_join(0, seed), sequence_index)


def key_at(sequence: int, position: int) -> int:
    """The noise key of a position of the sequence that a `sequence_key` stands for."""
    key = _join(sequence, position)
    return key - (1 << 64) if key >> 63 else key


def noise_key(seed: int, sequence_index: int, position: int) -> int:
    """The key of one row, as a signed 64-bit integer."""
    return key_at(sequence_key(seed, sequence_index), position)


def _join(key: int, part: int) -> int:
    return _mix(key ^ _mix((part + _STRIDE) & _MASK_64))


def _mix(value: int) -> int:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK_64
    return value ^ (value >> 31)
