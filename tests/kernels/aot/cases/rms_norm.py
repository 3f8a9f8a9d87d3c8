"""Launches of rms_norm that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.rms_norm import launch_rms_norm
from tests.kernels.aot.cases import FULLY


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    x, residual, out, total = (torch.empty(64, 4096, dtype=torch.bfloat16, device="meta") for _ in range(4))
    weight = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    found = {"add_bf16_4096": launch_rms_norm(x, residual, weight, out, total, 1e-5, 0.0, architecture)}
    if architecture in FULLY:
        found["bf16_4096"] = launch_rms_norm(x, None, weight, out, None, 1e-5, 0.0, architecture)
    return found
