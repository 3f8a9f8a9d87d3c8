"""grammar_mask on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def grammar_mask(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None) -> None:
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1  # [masks, words, 32]
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    if row_indices is None:
        logits.masked_fill_(forbidden, -math.inf)
        return
    used = row_indices >= 0
    rows = row_indices[used].long()
    logits[rows] = logits[rows].masked_fill(forbidden[used], -math.inf)
