"""grammar_mask by its definition."""

from __future__ import annotations

import math

from torch import Tensor


def grammar_mask(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None = None) -> None:
    """logits: [rows, vocab], changed in place.  bitmask: [masks, words] int32.  row_indices: [masks], or None."""
    for mask_index, words in enumerate(bitmask.tolist()):
        row = mask_index if row_indices is None else int(row_indices[mask_index])
        for token in range(logits.shape[1]):
            allowed = words[token // 32] >> token % 32 & 1
            if row >= 0 and not allowed:
                logits[row, token] = -math.inf
