"""The kernels of paged_attention: one for any mix of query lengths, with split-KV for short queries, and its reduction.

A program works on one tile of one sequence's query tokens, for one KV head: the query heads that share it lie packed
beside the tokens in the M dimension (row = token x group + head), so that each key and value is read once for all of
them. Online softmax in base 2 (FlashAttention-2, Dao 2023, section 3.1; Milakov and Gimelshein 2018). Sequences of at
most SPLIT_QUERY query tokens split their context over axis 2 of the grid (flash-decoding, Dao et al. 2023); how many
splits is decided here, from the context alone, so that a result does not depend on the batch.

Two choices that the compiled code asks for: the block ids of the next tile are loaded one iteration ahead, since a load
whose address hangs on another load of the same iteration is not pipelined; and float8 is widened by hand, bit by bit,
since sm_80 has no instruction for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose
from nereid_kernels.triton_lang.attention_logits import LOG2E, base2_logits
from nereid_kernels.triton_lang.kv_format import as_bits, format_of, scales_of, widen
from nereid_kernels.triton_lang.paging import find_tile, load_block_ids, split_length


@triton.jit
def _split_range(
    query_len: tl.tensor,
    seq_len: tl.tensor,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_QUERY: tl.constexpr,
) -> tl.tensor:
    """(first position that any query token sees, rounded down to a tile; positions a split; number of splits)."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // TILE * TILE
    length = seq_len - first
    if query_len <= SPLIT_QUERY:
        per_split = split_length(length, MIN_SPLIT, MAX_SPLITS, TILE)
    else:
        per_split = tl.maximum(length, 1)
    return first, per_split, tl.cdiv(length, per_split)


@triton.jit
def _paged_attention(
    query_ptr: tl.tensor,  # [tokens, heads, HEAD_DIM]
    k_ptr: tl.tensor,  # [block, kv_head, slot, HEAD_DIM]
    v_ptr: tl.tensor,  # as k_ptr
    out_ptr: tl.tensor,  # [tokens, heads, HEAD_DIM], contiguous
    partial_ptr: tl.tensor,  # [seqs, SPLIT_QUERY, heads, splits, HEAD_DIM + 2]: sums, maximum, divisor
    block_tables_ptr: tl.tensor,  # [seqs, max_blocks]
    cu_query_lens_ptr: tl.tensor,  # [seqs + 1]
    seq_lens_ptr: tl.tensor,  # [seqs]
    k_scale_ptr: tl.tensor,  # [1], [kv_heads], [block, kv_head, slot], or None
    v_scale_ptr: tl.tensor,
    sinks_ptr: tl.tensor,  # [heads] float32, or None
    alibi_ptr: tl.tensor,  # [heads] float32, or None
    ancestors_ptr: tl.tensor,  # [tokens] int64, or None
    positions_ptr: tl.tensor,  # [tokens] int32, with ancestors_ptr
    scale: tl.tensor,
    soft_cap: tl.tensor,
    num_seqs: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_QUERY: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    TREE: tl.constexpr = ancestors_ptr is not None
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    seq, tile = find_tile(cu_query_lens_ptr, tl.program_id(0), num_seqs, 1, BLOCK_Q)
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    tile_start = tile * BLOCK_Q
    first, per_split, num_splits = _split_range(
        query_len, seq_len, WINDOW, TILE, MIN_SPLIT, MAX_SPLITS, SPLIT_QUERY
    )  # fmt: skip
    if (tile_start >= query_len) | ((split >= num_splits) & (split > 0)):
        return

    # The rows of this program: query tokens x the heads of its group.
    rows = tl.arange(0, BLOCK_M)
    token = tile_start + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (token < query_len)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    token_index = (query_start + token).to(tl.int64)
    q_offsets = token_index * query_stride + head * query_head_stride
    q = tl.load(query_ptr + q_offsets[:, None] + d[None, :], mask=row_mask[:, None] & d_mask[None, :], other=0.0)
    context_len = seq_len - query_len
    query_positions = context_len + token
    ancestors = rows
    draft_positions = tl.arange(0, TILE)
    slopes = rows
    if TREE:
        query_positions = tl.load(positions_ptr + token_index, mask=row_mask, other=0)
        ancestors = tl.load(ancestors_ptr + token_index, mask=row_mask, other=0)
    if alibi_ptr is not None:
        slopes = tl.load(alibi_ptr + head, mask=row_mask, other=0.0)

    start = first + split * per_split
    if WINDOW > 0 and not TREE:  # a later tile of a long query sees nothing of what lies before its own window
        start = tl.maximum(start, tl.maximum(context_len + tile_start - WINDOW + 1, 0) // TILE * TILE)
    end = tl.minimum(first + (split + 1) * per_split, seq_len)
    if not TREE:
        end = tl.minimum(end, context_len + tl.minimum(tile_start + BLOCK_Q, query_len))

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    divisor = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        if split == 0:  # a sink is a logit without a value
            running_max = tl.load(sinks_ptr + head, mask=row_mask, other=0.0) * LOG2E
            divisor += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    k_scale = scale
    v_scale = 1.0
    if SCALES == "tensor" or SCALES == "head":
        which = kv_head if SCALES == "head" else 0
        k_scale = scale * tl.load(k_scale_ptr + which)
        v_scale = tl.load(v_scale_ptr + which)
    ids = load_block_ids(table_ptr, start, end, BLOCK_SIZE, TILE)
    for key_start in range(start, end, TILE):
        next_ids = load_block_ids(table_ptr, key_start + TILE, end, BLOCK_SIZE, TILE)
        key_positions = key_start + tl.arange(0, TILE)
        valid = key_positions < end
        slots = key_positions % BLOCK_SIZE
        offsets = ids.to(tl.int64) * block_stride + kv_head * head_stride + slots * slot_stride
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=valid[None, :] & d_mask[:, None], other=0)
        s = tl.dot(q, widen(k, FORMAT, q.dtype), input_precision="ieee") * k_scale
        if SCALES == "token":
            scale_offsets = ids.to(tl.int64) * scale_block_stride + kv_head * scale_head_stride + slots
            s *= tl.load(k_scale_ptr + scale_offsets, mask=valid, other=0.0)[None, :]
        if TREE:
            draft = key_positions - context_len
            draft_positions = tl.load(positions_ptr + query_start + draft, mask=valid & (draft >= 0), other=0)
        s = base2_logits(
            s, key_positions, query_positions, end, context_len, soft_cap, slopes, ancestors, draft_positions,
            SOFT_CAP, alibi_ptr is not None, TREE, WINDOW,
        )  # fmt: skip
        new_max = tl.maximum(running_max, tl.max(s, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # nothing seen yet: keep -inf - -inf out
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        divisor = divisor * rescale + tl.sum(p, axis=1)
        if SCALES == "token":
            p *= tl.load(v_scale_ptr + scale_offsets, mask=valid, other=0.0)[None, :]
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=valid[:, None] & d_mask[None, :], other=0)
        v = widen(v, FORMAT, q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
        ids = next_ids

    acc *= v_scale
    if num_splits <= 1:
        acc = acc / tl.where(divisor == 0.0, 1.0, divisor)[:, None]  # a row that sees nothing gives zeros
        out = out_ptr + (token_index * heads + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & d_mask[None, :])
    else:
        partial = ((seq.to(tl.int64) * SPLIT_QUERY + token) * heads + head) * tl.num_programs(2) + split
        partial = partial_ptr + partial * (HEAD_DIM + 2)
        tl.store(partial[:, None] + d[None, :], acc, mask=row_mask[:, None] & d_mask[None, :])
        tl.store(partial + HEAD_DIM, running_max, mask=row_mask)
        tl.store(partial + HEAD_DIM + 1, divisor, mask=row_mask)


@triton.jit
def _paged_attention_reduce(
    partial_ptr: tl.tensor,  # [seqs, SPLIT_QUERY, heads, grid_splits, HEAD_DIM + 2]
    out_ptr: tl.tensor,  # [tokens, heads, HEAD_DIM]
    cu_query_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    grid_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_QUERY: tl.constexpr,
) -> None:
    """One program a (sequence, query token, head): adds up what the splits of its context have left."""
    seq = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    _, _, num_splits = _split_range(query_len, seq_len, WINDOW, TILE, MIN_SPLIT, MAX_SPLITS, SPLIT_QUERY)
    if (token >= query_len) | (num_splits <= 1):
        return
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    d = tl.arange(0, BLOCK_D)
    row = (seq.to(tl.int64) * SPLIT_QUERY + token) * tl.num_programs(2) + head
    partial = partial_ptr + (row * grid_splits + splits) * (HEAD_DIM + 2)
    maxima = tl.load(partial + HEAD_DIM, mask=mask, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    weights = tl.exp2(maxima - tl.where(top == float("-inf"), 0.0, top))
    divisor = tl.sum(weights * tl.load(partial + HEAD_DIM + 1, mask=mask, other=0.0), axis=0)
    sums = tl.load(partial[:, None] + d[None, :], mask=mask[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(sums * weights[:, None], axis=0) / tl.where(divisor == 0.0, 1.0, divisor)
    out_row = (query_start + token).to(tl.int64) * tl.num_programs(2) + head
    tl.store(out_ptr + out_row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class SplitShape:
    """What follows from shapes alone about splitting, so that a grid can be captured.

    query: longest query that is split.  shortest: keys of a split at least.  most: splits that a context is cut into at
    most, whatever the batch.  grid: how many of them the widest block table can fill.
    """

    query: int
    shortest: int
    most: int
    grid: int

    @staticmethod
    def of(max_query_len: int, kv_heads: int, max_context: int, architecture: str) -> SplitShape:
        """max_context: what a block table can hold, in tokens."""
        tiles = choose("paged_attention_splits", architecture).tiles
        most = min(max(triton.next_power_of_2(128 // kv_heads), 8), tiles["MAX_SPLITS"])  # to keep a large GPU busy
        grid = min(most, triton.cdiv(max_context, tiles["MIN_SPLIT"]))
        return SplitShape(min(max(max_query_len, 1), 16), tiles["MIN_SPLIT"], most, max(grid, 1))

    def workspace(self, num_seqs: int, heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the float32 buffer that the splits leave their sums in."""
        return (num_seqs, self.query, heads, self.grid, head_dim + 2)


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one call, as the wrapper documents them."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    block_tables: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    ancestors: Tensor | None = None
    positions: Tensor | None = None


def launch_paged_attention(
    operands: Operands, max_query_len: int, scale: float, window: int, soft_cap: float, architecture: str | None = None
) -> tuple[Launch, Launch]:
    """The attention and the reduction of its splits, to be run in this order. What splits leave their sums in is made
    here, of a size that follows from shapes alone.
    """
    o = operands
    tokens, heads, head_dim = o.query.shape
    _, kv_heads, block_size, _ = o.k_cache.shape
    num_seqs, group, block_d = len(o.seq_lens), heads // kv_heads, triton.next_power_of_2(head_dim)
    architecture = architecture or architecture_of(o.query.device)
    max_context = o.block_tables.shape[1] * block_size
    split = SplitShape.of(max_query_len, kv_heads, max_context, architecture)
    short = max_query_len <= split.query
    kind = "paged_attention_short" if short else "paged_attention_long"
    config = choose(kind, architecture, itemsize=o.query.element_size(), size=block_d)
    block_m = max(config.tiles["BLOCK_M"], triton.next_power_of_2(group))
    if short:  # no wider than the rows that there are
        block_m = min(block_m, max(16, triton.next_power_of_2(group * max_query_len)))
    tile = config.tiles["TILE"]
    shared = {
        "cu_query_lens_ptr": o.cu_query_lens,
        "seq_lens_ptr": o.seq_lens,
        "out_ptr": o.out,
        "partial_ptr": torch.empty(split.workspace(num_seqs, heads, head_dim), device=o.query.device),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "WINDOW": window,
        "TILE": tile,
        "MIN_SPLIT": max(split.shortest, tile),
        "MAX_SPLITS": split.most,
        "SPLIT_QUERY": split.query,
    }
    per_token = o.k_scale is not None and o.k_scale.dim() == 3
    attention = {
        **shared,
        "query_ptr": o.query,
        "k_ptr": as_bits(o.k_cache),
        "v_ptr": as_bits(o.v_cache),
        "block_tables_ptr": o.block_tables,
        "k_scale_ptr": o.k_scale,
        "v_scale_ptr": o.v_scale,
        "sinks_ptr": o.sinks,
        "alibi_ptr": o.alibi_slopes,
        "ancestors_ptr": o.ancestors,
        "positions_ptr": o.positions,
        "scale": scale,
        "soft_cap": soft_cap,
        "num_seqs": num_seqs,
        "query_stride": o.query.stride(0),
        "query_head_stride": o.query.stride(1),
        "block_stride": o.k_cache.stride(0),
        "head_stride": o.k_cache.stride(1),
        "slot_stride": o.k_cache.stride(2),
        "table_stride": o.block_tables.stride(0),
        "scale_block_stride": o.k_scale.stride(0) if o.k_scale is not None and per_token else 0,
        "scale_head_stride": o.k_scale.stride(1) if o.k_scale is not None and per_token else 0,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "SOFT_CAP": soft_cap > 0,
        "SCALES": scales_of(o.k_scale),
        "FORMAT": format_of(o.k_cache.dtype),
        "BLOCK_M": block_m,
    }
    num_tiles = tokens // (block_m // group) + num_seqs
    return (
        Launch(_paged_attention, (num_tiles, kv_heads, split.grid), attention, config.num_warps, config.num_stages),
        Launch(_paged_attention_reduce, (num_seqs, split.query, heads), {**shared, "grid_splits": split.grid}, 4, 1),
    )
