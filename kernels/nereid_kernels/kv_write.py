"""kv_write: write a step's keys and values into the slots of a paged KV cache, quantised where the cache is.

A quantised cache holds x / scale, rounded to nearest even and saturated; its value is what it holds times the scale. A
scale for each token and head, computed from the largest magnitude of the row, follows Dettmers et al. 2022, section 3.1
(vector-wise quantisation). In int8 such a row has an offset, too, the middle of its range, and holds
(x - offset) / scale, since keys have columns that are large on one side; asymmetric as in KIVI (Liu et al. 2024, arXiv
2402.02750).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import (
    FLOATS,
    Size,
    check_contiguous_rows,
    check_dtypes,
    check_same_device,
    check_shapes,
)
from nereid_kernels.cpu import kv_write as cpu
from nereid_kernels.formats import QUANTISED, scale_dtype
from nereid_kernels.launch import run


@dataclass(frozen=True, slots=True)
class KVWritePlan:
    """Where a step's tokens go, worked out once for all layers by `plan_kv_write`.

    slot_mapping: [tokens] int64, block id x block size + offset; below 0 is padding, stored nowhere.
    slots: what the CPU's implementation has worked out, None where the kernels are used.
    """

    slot_mapping: Tensor
    slots: cpu.Slots | None


def plan_kv_write(slot_mapping: Tensor, cache: Tensor, *, backend: str = "auto") -> KVWritePlan:
    """Prepare `kv_write` for one step.

    slot_mapping: [tokens] int64; no slot twice, which is not checked.
    cache: a layer's K or V, [block, kv_head, slot, head_dim]; all layers must have its strides.
    """
    on_cpu = pick(cache.device, backend) == "cpu"
    return KVWritePlan(slot_mapping, cpu.plan_slots(slot_mapping, cache) if on_cpu else None)


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: KVWritePlan,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store key and value in place in k_cache and v_cache.

    key, value: [tokens, kv_heads, head_dim] float16, bfloat16 or float32; tokens and heads may be strided.
    k_cache, v_cache: a layer's views, [block, kv_head, slot, head_dim], of the same strides; of key's dtype (an exact
    copy), or float8_e4m3fn, float8_e5m2, int8 (quantised; a NaN stays one in float8, and becomes 0 in int8).
    k_scale, v_scale: float32, for a quantised cache only. [1] or [kv_heads] are given. [block, kv_head, slot] are
    written, at the same slots: the scale of each token and head, computed here, and of int8 the offset with it, as
    int32 (see formats); blocks may be strided. None is 1, which int8 does not allow.
    Raises ValueError or TypeError, which name the argument; slots are not checked.
    """
    sizes: dict[str, int] = {}
    shape = ("tokens", "kv_heads", "head_dim")
    check_shapes(sizes, key=(key, shape), value=(value, shape))
    check_dtypes(FLOATS, key=key)
    check_dtypes((key.dtype,), value=value)
    check_contiguous_rows(key=key, value=value)
    check_same_device(key=key, value=value, k_cache=k_cache)
    check_cache(sizes, key.dtype, k_cache, v_cache, plan.slot_mapping, k_scale, v_scale)
    if plan.slots is not None:
        cpu.kv_write(key, value, k_cache, v_cache, plan.slots, k_scale, v_scale)
    else:
        _kv_write(key, value, k_cache, v_cache, plan.slot_mapping, *split_scales(k_scale, v_scale))


def check_cache(
    sizes: dict[str, int],
    dtype: torch.dtype,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Check what `kv_write` stores in.

    sizes: tokens, kv_heads, head_dim.  dtype: the keys'.
    """
    shape = ("blocks", "kv_heads", "block_size", "head_dim")
    check_shapes(sizes, k_cache=(k_cache, shape), v_cache=(v_cache, shape), slot_mapping=(slot_mapping, ("tokens",)))
    check_dtypes((dtype, *QUANTISED), k_cache=k_cache)
    check_dtypes((k_cache.dtype,), v_cache=v_cache)
    check_dtypes((torch.int64,), slot_mapping=slot_mapping)
    check_contiguous_rows(k_cache=k_cache, slot_mapping=slot_mapping)
    _check_same_strides("v_cache", v_cache, "k_cache", k_cache)
    _check_scales(sizes, k_cache.dtype, k_scale, v_scale)
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_same_device(**tensors, **{name: scale for name, scale in scales.items() if scale is not None})


def _check_scales(sizes: dict[str, int], dtype: torch.dtype, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """dtype: the cache's."""
    if k_scale is None or v_scale is None:
        if k_scale is not v_scale:
            raise ValueError("k_scale, v_scale: got one of them; allowed: both or none")
        if dtype == torch.int8:
            raise ValueError("k_scale: got None; allowed: a tensor, since the cache is torch.int8")
        return
    if dtype not in QUANTISED:
        raise ValueError(f"k_scale: got a tensor; allowed: None, since the cache is {dtype}")
    check_dtypes((scale_dtype(dtype, by_token=k_scale.dim() == 3),), k_scale=k_scale, v_scale=v_scale)
    shape: tuple[Size, ...] = ("kv_heads",) if k_scale.numel() > 1 else tuple(k_scale.shape)
    if k_scale.dim() > 1:
        shape = ("blocks", "kv_heads", "block_size")
    check_shapes(sizes, k_scale=(k_scale, shape), v_scale=(v_scale, shape))
    _check_same_strides("v_scale", v_scale, "k_scale", k_scale)


def _check_same_strides(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.stride() != other.stride():
        raise ValueError(f"{name}: got strides {tensor.stride()}; allowed: {other.stride()}, as {other_name}")


def split_scales(k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """(k_scale, v_scale, k_scales, v_scales): the last two are those that are written, one for each token and head."""
    if k_scale is not None and k_scale.dim() == 3:
        return None, None, k_scale, v_scale
    return k_scale, v_scale, None, None


@torch.library.custom_op("nereid_kernels::kv_write", mutates_args=("k_cache", "v_cache", "k_scales", "v_scales"))
def _kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    from nereid_kernels.triton_lang.kv_write import launch_kv_write

    k_scale, v_scale = (k_scale, v_scale) if k_scales is None else (k_scales, v_scales)
    run(launch_kv_write(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale))


@_kv_write.register_fake
def _(*_: object) -> None:
    return None
