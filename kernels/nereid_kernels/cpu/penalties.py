"""penalties on the CPU."""

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
    generated = output_counts > 0
    factor = torch.where(prompt_mask | generated, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= frequency[:, None] * output_counts + presence[:, None] * generated


def apply_bias(logits: Tensor, bias_rows: Tensor, bias_ids: Tensor, bias_values: Tensor) -> None:
    lengths = bias_rows.diff().long()
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    first, last = bias_rows[:1], bias_rows[-1:]
    entries = slice(int(first), int(last))
    logits.index_put_((rows, bias_ids[entries].long()), bias_values[entries], accumulate=True)
