"""grammar_mask on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def grammar_mask(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None) -> None:
    # By table: the 8 flags of each byte that a word is made of.
    flags = (torch.arange(256)[:, None] >> torch.arange(8) & 1 == 0).view(torch.int64)[:, 0]
    octets = bitmask.contiguous().view(torch.uint8)  # [masks, 4 * words], the lowest first
    forbidden = flags.index_select(0, octets.flatten().int()).view(torch.bool).view(len(bitmask), 32 * bitmask.shape[1])
    forbidden = forbidden[:, : logits.shape[1]]
    if row_indices is None:
        logits.masked_fill_(forbidden, -math.inf)
        return
    for row, mask in zip(row_indices.tolist(), forbidden, strict=True):
        if row >= 0:
            logits[row].masked_fill_(mask, -math.inf)
