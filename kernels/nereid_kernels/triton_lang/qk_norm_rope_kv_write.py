"""The kernel of qk_norm_rope_kv_write: a program takes one token and a group of query heads, or a group of KV heads.

All is computed in float32 and rounded once, where it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose
from nereid_kernels.triton_lang.kv_write import cache_arguments, store_heads


@triton.jit
def _norm_and_rotate(
    row_ptrs: tl.tensor,  # [heads, 1]: where each head's row begins
    weight_ptr: tl.tensor,  # [HEAD_DIM], or None: no norm
    cos_sin_ptr: tl.tensor,  # [2, ROTARY_DIM]: the token's own
    head_mask: tl.tensor,  # [heads]
    eps: tl.tensor,
    weight_offset: tl.tensor,
    cos_sin_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """[heads, BLOCK_DIM] float32, 0 outside the mask."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    columns = tl.arange(0, BLOCK_DIM)
    partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
    in_head, in_rotary = columns < HEAD_DIM, columns < ROTARY_DIM
    x = tl.load(row_ptrs + columns[None, :], mask=head_mask[:, None] & in_head[None, :], other=0.0).to(tl.float32)
    # Each column's partner is loaded a second time, from the cache, rather than shuffled between threads.
    partner_mask = head_mask[:, None] & in_rotary[None, :]
    partner = tl.load(row_ptrs + partners[None, :], mask=partner_mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        norm = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + columns, mask=in_head, other=0.0).to(tl.float32) + weight_offset
        partner_weight = tl.load(weight_ptr + partners, mask=in_rotary, other=0.0).to(tl.float32) + weight_offset
        x = x * norm * weight[None, :]
        partner = partner * norm * partner_weight[None, :]
    cos = tl.load(cos_sin_ptr + columns, mask=in_rotary, other=1.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + cos_sin_stride + columns, mask=in_rotary, other=0.0).to(tl.float32)
    return x * cos[None, :] + partner * tl.where(columns < HALF, -sin, sin)[None, :]


@triton.jit
def _qk_norm_rope_kv_write(
    qkv_ptr: tl.tensor,  # [tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    cos_sin_ptr: tl.tensor,  # [tokens, 2, ROTARY_DIM]
    q_weight_ptr: tl.tensor,  # [HEAD_DIM], or None
    k_weight_ptr: tl.tensor,  # as q_weight_ptr
    query_ptr: tl.tensor,  # [tokens, HEADS, HEAD_DIM], contiguous
    k_cache_ptr: tl.tensor,  # [block, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_cache_ptr: tl.tensor,  # as k_cache_ptr
    slot_mapping_ptr: tl.tensor,  # [tokens]
    k_scale_ptr: tl.tensor,  # [1], [KV_HEADS] or [block, KV_HEADS, BLOCK_SIZE], or None; see _kv_write
    v_scale_ptr: tl.tensor,  # as k_scale_ptr
    eps: tl.tensor,
    weight_offset: tl.tensor,
    qkv_stride: tl.tensor,
    cos_sin_token_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    cache_block_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    cache_slot_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    QUERY_GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    row_ptr = qkv_ptr + token * qkv_stride
    angles_ptr = cos_sin_ptr + token * cos_sin_token_stride

    if group < QUERY_GROUPS:
        heads = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        query = _norm_and_rotate(
            row_ptr + heads[:, None] * HEAD_DIM, q_weight_ptr, angles_ptr, heads < HEADS, eps, weight_offset,
            cos_sin_stride, HEAD_DIM, ROTARY_DIM, BLOCK_DIM,
        )  # fmt: skip
        query_ptrs = query_ptr + (token * HEADS + heads[:, None]) * HEAD_DIM + columns
        mask = (heads < HEADS)[:, None] & (columns < HEAD_DIM)
        tl.store(query_ptrs, query.to(query_ptr.dtype.element_ty), mask=mask)
        return

    slot = tl.load(slot_mapping_ptr + token)  # int64, and so is what follows from it
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = (group - QUERY_GROUPS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head_mask = heads < KV_HEADS
    mask = head_mask[:, None] & (columns < HEAD_DIM)
    key = _norm_and_rotate(
        row_ptr + (HEADS + heads)[:, None] * HEAD_DIM, k_weight_ptr, angles_ptr, head_mask, eps, weight_offset,
        cos_sin_stride, HEAD_DIM, ROTARY_DIM, BLOCK_DIM,
    )  # fmt: skip
    value = tl.load(row_ptr + (HEADS + KV_HEADS + heads)[:, None] * HEAD_DIM + columns, mask=mask, other=0.0)
    at = block * cache_block_stride + offset * cache_slot_stride + heads[:, None] * cache_head_stride + columns
    scale_at = block * scale_block_stride + offset * scale_slot_stride + heads * scale_head_stride
    k_scale_ptrs = None if SCALES == "none" else k_scale_ptr + scale_at
    v_scale_ptrs = None if SCALES == "none" else v_scale_ptr + scale_at
    store_heads(key, k_cache_ptr + at, k_scale_ptrs, head_mask, mask, FORMAT, SCALES, LIMIT)
    store_heads(value, v_cache_ptr + at, v_scale_ptrs, head_mask, mask, FORMAT, SCALES, LIMIT)


def launch_qk_norm_rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    architecture: str | None = None,
) -> Launch:
    """query: [tokens, heads, head_dim], contiguous, written.  For the rest see `nereid_kernels.qk_norm_rope_kv_write`.

    architecture: qkv's device's own, unless it is compiled for another.
    """
    tokens, heads, _ = query.shape
    kv_heads = k_cache.shape[1]
    config = choose("qk_norm_rope_kv_write", architecture or architecture_of(qkv.device), itemsize=qkv.element_size())
    block_heads = min(config.tiles["BLOCK_HEADS"], triton.next_power_of_2(max(heads, kv_heads)))
    arguments = {
        "qkv_ptr": qkv,
        "cos_sin_ptr": cos_sin,
        "q_weight_ptr": q_weight,
        "k_weight_ptr": k_weight,
        "query_ptr": query,
        "eps": eps,
        "weight_offset": weight_offset,
        "qkv_stride": qkv.stride(0),
        "cos_sin_token_stride": cos_sin.stride(0),
        "cos_sin_stride": cos_sin.stride(1),
        "HEADS": heads,
        "ROTARY_DIM": cos_sin.shape[2],
        **cache_arguments(k_cache, v_cache, slot_mapping, k_scale, v_scale),
        "BLOCK_HEADS": block_heads,
    }
    grid = (tokens, triton.cdiv(heads, block_heads) + triton.cdiv(kv_heads, block_heads))
    return Launch(_qk_norm_rope_kv_write, grid, arguments, config.num_warps, config.num_stages)
