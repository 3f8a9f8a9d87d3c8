"""Launches of kv_write that are compiled ahead of time."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.formats import scale_dtype
from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.kv_write import launch_kv_write

_BLOCKS, _LAYERS, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM = 4096, 32, 8, 16, 128


def make_cache(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A layer's views of a pool."""
    pool = torch.empty(_BLOCKS, _LAYERS, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM, dtype=dtype, device="meta")
    return pool[:, 1, 0], pool[:, 1, 1]


def make_scales(form: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor | None, Tensor | None]:
    """dtype: the cache's."""
    if form == "none":
        return None, None
    shape = {"tensor": (1,), "head": (_KV_HEADS,), "token": (_BLOCKS, _KV_HEADS, _BLOCK_SIZE)}[form]
    found = scale_dtype(dtype, by_token=form == "token")
    k_scale, v_scale = (torch.empty(shape, dtype=found, device="meta") for _ in range(2))
    return k_scale, v_scale


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    qkv = torch.empty(256, 6 * _KV_HEADS, _HEAD_DIM, dtype=torch.bfloat16, device="meta")
    key, value = qkv[:, 4 * _KV_HEADS : 5 * _KV_HEADS], qkv[:, 5 * _KV_HEADS :]
    slot_mapping = torch.empty(256, dtype=torch.int64, device="meta")
    cases = {
        "bf16": (torch.bfloat16, "none"),
        "e4m3_token": (torch.float8_e4m3fn, "token"),
    }
    return {
        name: launch_kv_write(key, value, *make_cache(dtype), slot_mapping, *make_scales(form, dtype), architecture)
        for name, (dtype, form) in cases.items()
    }
