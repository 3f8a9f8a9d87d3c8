"""Launches of penalties that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.penalties import launch_bias, launch_penalties


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    logits = torch.empty(64, 128256, device="meta")
    scale = torch.empty(64, device="meta")
    bias_rows, bias_ids = (torch.empty(n, dtype=torch.int32, device="meta") for n in (65, 640))
    bias_values = torch.empty(640, device="meta")
    return {
        "penalties": launch_penalties(logits, logits.int(), logits.bool(), scale, scale, scale, architecture),
        "bias": launch_bias(logits, bias_rows, bias_ids, bias_values, architecture),
    }
