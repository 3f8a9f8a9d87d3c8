"""Launches of matmul that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.matmul import launch_matmul


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    return {
        "bf16_4096x4096": _launch(torch.bfloat16, architecture),
        "fp32_4096x4096": _launch(torch.float32, architecture),
    }


def _launch(dtype: torch.dtype, architecture: str) -> Launch:
    x, weight, out = (torch.empty(rows, 4096, dtype=dtype, device="meta") for rows in (256, 4096, 256))
    return launch_matmul(x, weight, None, out, architecture)
