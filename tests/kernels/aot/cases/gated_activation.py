"""Launches of gated_activation that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.gated_activation import launch_gated_activation


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    gate_up = torch.empty(64, 28672, dtype=torch.bfloat16, device="meta")
    out = torch.empty(64, 14336, dtype=torch.bfloat16, device="meta")
    return {"gelu_bf16_14336": launch_gated_activation(gate_up, out, "gelu", architecture)}
