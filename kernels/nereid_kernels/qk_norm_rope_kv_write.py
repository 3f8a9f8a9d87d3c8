"""qk_norm_rope_kv_write: from a layer's projection to its queries and to the paged KV cache, in one pass over memory.

Each head of the queries and keys is normed (Henry et al. 2020; RMSNorm in the place of their norm, as in Qwen3 and
Gemma 3), turned by its position (rotary embedding: Su et al. 2021, equation 34, in the order of GPT-NeoX), and the keys
and values are stored as `kv_write` does it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import qk_norm_rope_kv_write as cpu
from nereid_kernels.kv_write import KVWritePlan, check_cache, split_scales
from nereid_kernels.launch import run


def qk_norm_rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: KVWritePlan,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The queries, [tokens, heads, head_dim] of qkv's dtype, computed in float32; keys and values go to the cache.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim] float16, bfloat16 or float32; tokens may be strided. The cache says
    how many kv_heads there are.
    cos_sin: [tokens, 2, rotary_dim] float32 or of qkv's dtype, the row of each token's position; cosines, then sines,
    for each column; rotary_dim is even and at most head_dim. Column d < rotary_dim / 2 is turned with column
    d + rotary_dim / 2; the columns from rotary_dim on are left as they are.
    q_weight, k_weight: [head_dim] of qkv's dtype or float32, to norm each head: x / sqrt(mean(x^2) + eps) *
    (weight_offset + weight); None, both: no norm.
    k_cache, v_cache, plan, k_scale, v_scale: as for `kv_write`.
    Raises ValueError or TypeError, which name the argument; slots are not checked.
    """
    sizes = _check_projection(qkv, k_cache)
    _check_rotary(qkv, cos_sin, sizes)
    _check_weights(qkv, q_weight, k_weight, sizes["head_dim"])
    check_same_device(qkv=qkv, cos_sin=cos_sin, k_cache=k_cache)
    check_cache(sizes, qkv.dtype, k_cache, v_cache, plan.slot_mapping, k_scale, v_scale)
    norm = (q_weight, k_weight, eps, weight_offset)
    if plan.slots is not None:
        return cpu.qk_norm_rope_kv_write(qkv, cos_sin, k_cache, v_cache, plan.slots, *norm, k_scale, v_scale)
    query: Tensor = _qk_norm_rope_kv_write(
        qkv, cos_sin, k_cache, v_cache, plan.slot_mapping, *norm, *split_scales(k_scale, v_scale)
    )
    return query


def _check_projection(qkv: Tensor, k_cache: Tensor) -> dict[str, int]:
    """The sizes of the call."""
    sizes: dict[str, int] = {}
    check_shapes(
        sizes,
        k_cache=(k_cache, ("blocks", "kv_heads", "block_size", "head_dim")),
        qkv=(qkv, ("tokens", "width")),
    )
    heads, rest = divmod(sizes["width"], sizes["head_dim"])
    if rest or heads <= 2 * sizes["kv_heads"]:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)}; allowed: a multiple of head_dim={sizes['head_dim']} "
            f"that holds more than 2 * kv_heads={2 * sizes['kv_heads']} heads"
        )
    check_dtypes(FLOATS, qkv=qkv)
    check_contiguous_rows(qkv=qkv)
    return sizes


def _check_rotary(qkv: Tensor, cos_sin: Tensor, sizes: dict[str, int]) -> None:
    check_shapes(sizes, cos_sin=(cos_sin, ("tokens", 2, "rotary_dim")))
    rotary_dim, head_dim = sizes["rotary_dim"], sizes["head_dim"]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"cos_sin: got rotary_dim {rotary_dim}; allowed: even, at most head_dim={head_dim}")
    check_dtypes((torch.float32, qkv.dtype), cos_sin=cos_sin)
    check_contiguous_rows(cos_sin=cos_sin)


def _check_weights(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, head_dim: int) -> None:
    if q_weight is None or k_weight is None:
        if q_weight is not k_weight:
            raise ValueError("q_weight, k_weight: got one of them; allowed: both or none")
        return
    check_shapes({}, q_weight=(q_weight, (head_dim,)), k_weight=(k_weight, (head_dim,)))
    check_dtypes((torch.float32, qkv.dtype), q_weight=q_weight, k_weight=k_weight)
    check_contiguous_rows(q_weight=q_weight, k_weight=k_weight)
    check_same_device(qkv=qkv, q_weight=q_weight, k_weight=k_weight)


def _empty_queries(qkv: Tensor, k_cache: Tensor) -> Tensor:
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    return torch.empty(qkv.shape[0], heads, head_dim, dtype=qkv.dtype, device=qkv.device)


@torch.library.custom_op(
    "nereid_kernels::qk_norm_rope_kv_write", mutates_args=("k_cache", "v_cache", "k_scales", "v_scales")
)
def _qk_norm_rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> Tensor:
    from nereid_kernels.triton_lang.qk_norm_rope_kv_write import launch_qk_norm_rope_kv_write

    k_scale, v_scale = (k_scale, v_scale) if k_scales is None else (k_scales, v_scales)
    query = _empty_queries(qkv, k_cache)
    run(
        launch_qk_norm_rope_kv_write(
            qkv, cos_sin, query, k_cache, v_cache, slot_mapping, q_weight, k_weight, eps, weight_offset,
            k_scale, v_scale,
        )
    )  # fmt: skip
    return query


@_qk_norm_rope_kv_write.register_fake
def _(qkv: Tensor, cos_sin: Tensor, k_cache: Tensor, *_: object) -> Tensor:
    return _empty_queries(qkv, k_cache)
