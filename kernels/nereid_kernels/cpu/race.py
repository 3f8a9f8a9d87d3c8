"""race: who wins among all tokens of a row, where the noise of each would cost more than the rest of the draw.

Gumbel noise exceeds x with a chance of at most exp(-x), so a token can overtake the best one found so far only where
its uniform number lies within exp(score - best) of 1. That is told from the number's upper half, without a logarithm;
the noise itself is then worked out for the few that are left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.draw_noise import distance_from_one, gumbel

_MARGIN = 2.0**31 * (1.0 + 1e-4)  # the scale of distance_from_one, and room for the rounding of float32


def race(scores: Tensor, bound: Tensor, best: Tensor, keys: Tensor) -> Tensor:
    """The token [rows] of the largest noisy score among the scores [rows, vocab] not below bound [rows].

    best: [rows] float64, the noisy score of one of them.  keys: [rows].
    """
    ids = torch.arange(scores.shape[1])
    chance = (scores - best[:, None].float()).exp_().mul_(_MARGIN)
    if bool((bound > -torch.inf).any()):
        chance.masked_fill_(scores < bound[:, None], -torch.inf)
    runners = (distance_from_one(keys[:, None], ids) <= chance).nonzero()
    rows, tokens = runners.unbind(1)
    noisy = scores[rows, tokens].double() + gumbel(keys[rows], tokens)
    most = torch.full_like(best, -torch.inf).scatter_reduce_(0, rows, noisy, "amax")
    winners = torch.where(noisy == most[rows], tokens, scores.shape[1])
    return torch.full_like(keys, scores.shape[1]).scatter_reduce_(0, rows, winners, "amin")
