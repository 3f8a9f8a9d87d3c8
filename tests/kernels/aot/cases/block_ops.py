"""Launches of copy_blocks and gather_blocks that are compiled ahead of time; scatter_blocks is the latter's mirror."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.block_ops import launch_copy_blocks


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    pool = torch.empty(4096, 32, 2, 8, 16, 128, dtype=torch.bfloat16, device="meta")
    pairs = torch.empty(16, 2, dtype=torch.int64, device="meta")
    return {
        "copy_bf16": launch_copy_blocks(pool, pairs, architecture),
    }
