"""Launches of matmul_int8 and matmul_int4 that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.quantised_matmul import launch_matmul_int4, launch_matmul_int8
from tests.kernels.aot.cases import FULLY


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    x, out = (_empty(256, 4096, dtype=torch.bfloat16) for _ in range(2))
    weight, packed = _empty(4096, 4096, dtype=torch.int8), _empty(4096, 2048, dtype=torch.uint8)
    scales, zero_points = _empty(4096, 32, dtype=torch.bfloat16), _empty(4096, 32, dtype=torch.uint8)
    found = {
        "int8_channel_bf16": launch_matmul_int8(x, weight, scales[:, 0].contiguous(), out, architecture),
        "int4_group_128_bf16": launch_matmul_int4(x, packed, scales, zero_points, out, 128, architecture),
    }
    if architecture in ("sm_80", *FULLY):
        found["int8_group_128_bf16"] = launch_matmul_int8(x, weight, scales, out, architecture)
    return found


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
