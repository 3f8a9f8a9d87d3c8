"""Launches of qk_norm_rope_kv_write that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.qk_norm_rope_kv_write import launch_qk_norm_rope_kv_write
from tests.kernels.aot.cases import FULLY
from tests.kernels.aot.cases.kv_write import make_cache, make_scales

_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM, _EPS = 256, 32, 8, 128, 1e-6


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    qkv = torch.empty(_TOKENS, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, dtype=torch.bfloat16, device="meta")
    query = torch.empty(_TOKENS, _HEADS, _HEAD_DIM, dtype=torch.bfloat16, device="meta")
    slot_mapping = torch.empty(_TOKENS, dtype=torch.int64, device="meta")
    cos_sin = torch.empty(_TOKENS, 2, _HEAD_DIM, device="meta")
    weight = torch.empty(_HEAD_DIM, dtype=torch.bfloat16, device="meta")
    cases: dict[str, tuple[torch.Tensor | None, torch.dtype, str]] = {
        "norm_bf16": (weight, torch.bfloat16, "none"),
        "norm_e4m3_token": (weight, torch.float8_e4m3fn, "token"),
    }
    if architecture in FULLY:
        cases["int8_token"] = (None, torch.int8, "token")
    return {
        name: launch_qk_norm_rope_kv_write(
            qkv, cos_sin, query, *make_cache(dtype), slot_mapping, norm, norm, _EPS, 0.0,
            *make_scales(form, dtype), architecture,
        )
        for name, (norm, dtype, form) in cases.items()
    }  # fmt: skip
