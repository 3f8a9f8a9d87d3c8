"""Noise as a pure function of (key, token id), and the race that draws a token by it; bit for bit that of `draw_noise`.

A logarithm in float64 is slow (on GPUs for graphics 64 times slower than in float32), and only the winner's value
matters. So the race looks at every token in float32, with an error far below MARGIN, and computes a tile in float64
only where one of its tokens might beat the best so far: of n tiles in random order that is about log(n).
"""

from __future__ import annotations

import triton
import triton.language as tl

# How much the float32 noise may be off. Its error is below 1e-4; that of a score it is added to matters only for scores
# that can win, which lie within 41 (the range of the noise) of the best.
MARGIN = tl.constexpr(1e-2)


@triton.jit
def random_bits(key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """64 of them, of SplitMix64."""
    bits = key.to(tl.uint64) + token_ids.to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def uniform(bits: tl.tensor) -> tl.tensor:
    """Float64 in (0, 1), both ends excluded."""
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52


@triton.jit
def _gumbel(bits: tl.tensor) -> tl.tensor:
    """Float64, exact."""
    return -tl.log(-tl.log(uniform(bits)))


@triton.jit
def _gumbel_float32(bits: tl.tensor) -> tl.tensor:
    """Float32, nearly. Close to 1, where -log(u) loses its digits, a series in 1 - u gives it."""
    u = (bits >> 12).to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    rest = ((~bits) >> 12).to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -tl.log(tl.where(u < 0.99, -tl.log(tl.minimum(u, 0.99)), series))


@triton.jit
def race(best: tl.tensor, winner: tl.tensor, scores: tl.tensor, token_ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """(best, winner) after one more tile: the largest score + noise in float64, and its token id.

    scores: [BLOCK] float32, log p up to a constant; -inf never wins.  token_ids: [BLOCK] int32.
    """
    bits = random_bits(key, token_ids)
    if tl.max(scores + _gumbel_float32(bits), axis=0) > best - MARGIN:
        noisy = scores.to(tl.float64) + _gumbel(bits)
        tile_best = tl.max(noisy, axis=0)
        if tile_best > best:
            best = tile_best
            winner = tl.min(tl.where(noisy == tile_best, token_ids, 0x7FFFFFFF), axis=0)
    return best, winner
