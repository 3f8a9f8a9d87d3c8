"""Launches of grammar_mask that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.grammar_mask import launch_grammar_mask


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    logits = torch.empty(64, 128256, device="meta")
    bitmask = torch.empty(16, 4008, dtype=torch.int32, device="meta")
    row_indices = torch.empty(16, dtype=torch.int64, device="meta")
    return {"some_rows": launch_grammar_mask(logits, bitmask, row_indices, architecture)}
