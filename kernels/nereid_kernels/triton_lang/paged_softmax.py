"""The online softmax of a tile of query rows over a range of one sequence's keys, in base 2.

FlashAttention-2 (Dao 2023, section 3.1; Milakov and Gimelshein 2018). Two choices that the compiled code asks for: the
block ids of the next tile are loaded one iteration ahead, since a load whose address hangs on another load of the same
iteration is not pipelined; and float8 is widened by hand, bit by bit, since sm_80 has no instruction for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nereid_kernels.splitting import MAX_TREE
from nereid_kernels.triton_lang.kv_format import offset_in, scale_in, widen
from nereid_kernels.triton_lang.paging import is_kept, key_at, load_block_ids

LOG2E = tl.constexpr(1.4426950408889634)
_MAX_TREE = tl.constexpr(MAX_TREE)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Float32, to about its last digit: by the series near 0, by a quotient of exponentials, by what 1 exceeds it."""
    square = x * x
    series = -0.05396825 + square * 0.021869488
    series = x + x * square * (-0.33333334 + square * (0.13333334 + square * series))
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = tl.where(tl.abs(x) < 1.0, (1.0 - small) / (1.0 + small), 1.0 - 2.0 * small / (1.0 + small))
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def attend(
    q: tl.tensor,  # [M, BLOCK_D], 0 outside
    token: tl.tensor,  # [M], which of the sequence's query tokens a row is
    query_positions: tl.tensor,  # [M]
    ancestors: tl.tensor,  # [M] int64, with TREE
    slopes: tl.tensor,  # [M], with ALIBI; times LOG2E
    running_max: tl.tensor,  # [M], -inf, or a sink's logit
    divisor: tl.tensor,  # [M], 0, or a sink's 1
    k_ptr: tl.tensor,  # [block, slot, HEAD_DIM], of one KV head
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,  # [1], or [block, slot] where SCALES is "token", of one KV head; of int8 then with offsets
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,  # [max_blocks], the sequence's
    draft_positions_ptr: tl.tensor,  # [query_len], the sequence's, with TREE
    first: tl.tensor,  # where the sequence's range of places begins; see paging
    start: tl.tensor,  # a place, a multiple of TILE
    end: tl.tensor,
    lowest: tl.tensor,  # the first key in any row's window
    context_len: tl.tensor,
    query_len: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """(largest logit [M], sum of 2 ** (logit - largest) [M], values weighted by that [M, BLOCK_D]), all float32."""
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    # Logits in base 2, without a multiplication of their own: each would cost a rounding, too.
    k_scale = scale if SOFT_CAP else scale * LOG2E
    v_scale = 1.0
    if SCALES == "tensor" or SCALES == "head":
        k_scale *= tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    HAS_OFFSETS: tl.constexpr = SCALES == "token" and FORMAT == "int8"
    if HAS_OFFSETS:  # a key's offset meets the sum of the query
        q_sum = tl.sum(q.to(tl.float32), axis=1) * k_scale
    key_start = key_at(start, first, SINK_TOKENS, TILE)
    ids = load_block_ids(table_ptr, key_start, end, BLOCK_SIZE, TILE, lowest, SINK_TOKENS)
    for place in range(start, end, TILE):
        next_start = key_at(place + TILE, first, SINK_TOKENS, TILE)
        next_ids = load_block_ids(table_ptr, next_start, end, BLOCK_SIZE, TILE, lowest, SINK_TOKENS)
        keys = key_at(place, first, SINK_TOKENS, TILE) + tl.arange(0, TILE)
        valid = keys < end
        if WINDOW > 0:
            valid = valid & is_kept(keys, lowest, SINK_TOKENS)
        slots = keys % BLOCK_SIZE
        offsets = ids.to(tl.int64) * block_stride + slots * slot_stride
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=valid[None, :] & d_mask[:, None], other=0)
        s = tl.dot(q, widen(k, FORMAT, q.dtype), input_precision="ieee") * k_scale
        if SCALES == "token":
            scale_offsets = ids.to(tl.int64) * scale_block_stride + slots
            k_scales = tl.load(k_scale_ptr + scale_offsets, mask=valid, other=0)[None, :]
            s = s * scale_in(k_scales) + q_sum[:, None] * offset_in(k_scales) if HAS_OFFSETS else s * k_scales
        if SOFT_CAP:
            s = (soft_cap * LOG2E) * tanh(s / soft_cap)
        at = keys
        seen = keys[None, :] <= (context_len + token)[:, None]
        if TREE:  # a draft token sees the context, and of the draft tokens its ancestors and itself
            draft = keys - context_len
            is_draft = valid & (draft >= 0)
            at = tl.where(draft < 0, keys, tl.load(draft_positions_ptr + draft, mask=is_draft, other=0))
            bit = (ancestors[:, None] >> tl.minimum(tl.maximum(draft, 0), 63)[None, :].to(tl.int64)) & 1
            if query_len <= _MAX_TREE:
                seen = (draft < 0)[None, :] | (bit != 0)
        seen = seen & valid[None, :]
        if WINDOW > 0:
            near = at
            if SINK_TOKENS > 0:  # within every window; a tile's columns cost fewer registers than its elements
                near = tl.where(at < SINK_TOKENS, 1 << 30, at)
            seen = seen & (query_positions[:, None] - near[None, :] < WINDOW)
        if ALIBI:
            s += slopes[:, None] * (at[None, :] - query_positions[:, None])
        s = tl.where(seen, s, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(s, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # nothing seen yet: keep -inf - -inf out
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        divisor = divisor * rescale + tl.sum(p, axis=1)
        if SCALES == "token":
            v_scales = tl.load(v_scale_ptr + scale_offsets, mask=valid, other=0)[None, :]
            if HAS_OFFSETS:
                v_added = tl.sum(p * offset_in(v_scales), axis=1)[:, None]
            p *= scale_in(v_scales) if HAS_OFFSETS else v_scales
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=valid[:, None] & d_mask[None, :], other=0)
        v = widen(v, FORMAT, q.dtype)
        p = p.to(v.dtype)
        acc = acc * rescale[:, None] + v_added if HAS_OFFSETS else acc * rescale[:, None]
        acc = tl.dot(p, v, acc, input_precision="ieee")
        running_max = new_max
        ids = next_ids
    return running_max, divisor, acc * v_scale
