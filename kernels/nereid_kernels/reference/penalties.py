"""penalties by their definition."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """logits: [rows, vocab], changed in place.  output_counts, prompt_mask: [rows, vocab].  The others: [rows]."""
    seen = prompt_mask | (output_counts > 0)
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(seen, repeated, logits))
    logits -= frequency[:, None] * output_counts
    logits -= presence[:, None] * (output_counts > 0)


def apply_bias(logits: Tensor, bias_rows: Tensor, bias_ids: Tensor, bias_values: Tensor) -> None:
    """logits: [rows, vocab], changed in place.  bias_rows: [rows + 1].  bias_ids, bias_values: [entries]."""
    for row in range(len(logits)):
        for entry in range(int(bias_rows[row]), int(bias_rows[row + 1])):
            logits[row, int(bias_ids[entry])] += bias_values[entry]
