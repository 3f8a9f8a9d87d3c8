"""sample by its definition: one row after the other, by a sort."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nereid_kernels.draw_noise import GREEDY_TEMPERATURE, gumbel


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab].  The others: [rows].  Returns token ids [rows] int64 and sound [rows] bool."""
    sound = logits.amax(dim=1).isfinite()  # a NaN is the largest of all
    tokens = [
        _draw(*row) if is_sound else 0
        for is_sound, *row in zip(sound.tolist(), logits, temperature, min_p, top_k, top_p, keys, strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.int64), sound


def _draw(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, key: Tensor) -> int:
    greedy = int(logits.argmax())  # the first of equals
    if temperature < GREEDY_TEMPERATURE:
        return greedy
    scores = (logits - logits[greedy]) / temperature
    ordered = scores.sort(descending=True).values
    bound = min_p.double().log().float()
    if 0 < top_k < len(logits):
        bound = torch.maximum(bound, ordered[int(top_k) - 1])
    if top_p < 1.0:
        kept = ordered[ordered >= bound]
        mass = kept.double().exp().cumsum(0)
        last = int((mass < top_p.double() * mass[-1]).sum())
        bound = kept[min(last, len(kept) - 1)]
    noisy = scores.double() + gumbel(key, torch.arange(len(logits)))
    return int(noisy.masked_fill(scores < bound, -math.inf).argmax())
