"""The kernels of paged_attention, and the launches that one call takes.

A program works on one tile of one sequence's query tokens, for one KV head: the query heads that share it lie packed
beside the tokens in the M dimension (row = token x group + head), so that each key and value is read once for all of
them.

A sequence of up to SPLIT_QUERY query tokens is short: its context is split among programs (flash-decoding, Dao et al.
2023), whose sums `_paged_attention_reduce` adds up. How it is split follows from its own lengths alone, so that its
result does not depend on the batch. Longer queries have tiles enough, and one program goes through all keys of a tile.
A call may hold both kinds; each has a launch of its own, which passes over the other's sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Config, Launch, architecture_of, choose
from nereid_kernels.splitting import SPLIT_QUERY
from nereid_kernels.triton_lang.kv_format import as_bits, format_of, scales_of
from nereid_kernels.triton_lang.paged_softmax import LOG2E, attend
from nereid_kernels.triton_lang.paging import find_tile, first_place, split_range

WORKSPACE_BYTES = 256 << 20  # what the splits of one round of sequences may leave their sums in
_MAX_SHORT = tl.constexpr(SPLIT_QUERY)


# NOTE: numbers that change from step to step are neither constexpr nor specialised, so that a step compiles nothing.
@triton.jit(do_not_specialize=["first_seq", "num_seqs", "tiles_per_seq", "split_query", "table_stride"])
def _paged_attention(
    query_ptr: tl.tensor,  # [tokens, heads, HEAD_DIM]
    k_ptr: tl.tensor,  # [block, kv_head, slot, HEAD_DIM]
    v_ptr: tl.tensor,  # as k_ptr
    out_ptr: tl.tensor,  # [tokens, heads, HEAD_DIM], contiguous
    partial_ptr: tl.tensor,  # [seqs of the round, split_query, heads, splits, HEAD_DIM + 2]: sums, maximum, divisor
    block_tables_ptr: tl.tensor,  # [seqs, max_blocks]
    cu_query_lens_ptr: tl.tensor,  # [seqs + 1]
    seq_lens_ptr: tl.tensor,  # [seqs]
    k_scale_ptr: tl.tensor,  # [1], [kv_heads], [block, kv_head, slot], or None
    v_scale_ptr: tl.tensor,  # as k_scale_ptr
    sinks_ptr: tl.tensor,  # [heads] float32, or None
    alibi_ptr: tl.tensor,  # [heads] float32, or None
    ancestors_ptr: tl.tensor,  # [tokens] int64, or None
    positions_ptr: tl.tensor,  # [tokens] int32, with ancestors_ptr
    first_seq: tl.tensor,  # of the round, with SHORT
    num_seqs: tl.tensor,
    tiles_per_seq: tl.tensor,  # with SHORT
    split_query: tl.tensor,  # with SHORT
    scale: tl.tensor,
    soft_cap: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr, SCALES: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SHORT: tl.constexpr,  # whether this launch is for sequences of up to SPLIT_QUERY query tokens, or for the rest
) -> None:  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    TREE: tl.constexpr = ancestors_ptr is not None
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if SHORT:
        seq = first_seq + tl.program_id(0) // tiles_per_seq
        tile = tl.program_id(0) % tiles_per_seq
    else:  # backwards: a query's last tile has most keys to see
        last = tl.num_programs(0) - 1
        seq, tile = find_tile(cu_query_lens_ptr, last - tl.program_id(0), num_seqs, 1, BLOCK_Q)
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    tile_start = tile * BLOCK_Q
    first, per_split, num_splits = split_range(query_len, seq_len, WINDOW, SINK_TOKENS, TILE, MIN_SPLIT, MAX_SPLITS)
    is_others = query_len > _MAX_SHORT if SHORT else query_len <= _MAX_SHORT
    if is_others | (tile_start >= query_len) | ((split >= num_splits) & (split > 0)):
        return

    # The rows of this program: query tokens x the heads of its group.
    rows = tl.arange(0, BLOCK_M)
    token = tile_start + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (token < query_len)
    d = tl.arange(0, BLOCK_D)
    tile_mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    token_index = (query_start + token).to(tl.int64)
    q_offsets = token_index * query_stride + head * query_head_stride
    q = tl.load(query_ptr + q_offsets[:, None] + d[None, :], mask=tile_mask, other=0.0)
    context_len = seq_len - query_len
    query_positions = context_len + token
    ancestors = rows.to(tl.int64)
    slopes = rows.to(tl.float32)
    draft_positions_ptr = positions_ptr
    lowest = tl.maximum(context_len + tile_start - WINDOW + 1, 0) if WINDOW > 0 else 0
    highest = context_len + tl.minimum(tile_start + BLOCK_Q, query_len)
    if TREE:  # siblings' positions are alike, and do not grow with the token
        query_positions = tl.load(positions_ptr + token_index, mask=row_mask, other=0)
        ancestors = tl.load(ancestors_ptr + token_index, mask=row_mask, other=0)
        draft_positions_ptr = positions_ptr + query_start
        lowest = tl.maximum(context_len - WINDOW + 1, 0) if WINDOW > 0 else 0
        highest = seq_len
    if alibi_ptr is not None:
        slopes = tl.load(alibi_ptr + head, mask=row_mask, other=0.0) * LOG2E
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    divisor = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        if split == 0:  # a sink is a logit without a value
            row_max = tl.load(sinks_ptr + head, mask=row_mask, other=0.0) * LOG2E
            divisor += 1.0

    start = first_place(lowest, SINK_TOKENS, TILE)
    end = highest
    if SHORT:  # with sinks, where the splits are cut says which places are theirs
        start = first + split * per_split if SINK_TOKENS > 0 else tl.maximum(first + split * per_split, start)
        end = tl.minimum(first + (split + 1) * per_split, highest)
    else:
        first = start
    scale_at = kv_head * scale_head_stride  # where the stride is 0, one scale is for all heads
    row_max, divisor, acc = attend(
        q, token, query_positions, ancestors, slopes, row_max, divisor, k_ptr + kv_head * head_stride,
        v_ptr + kv_head * head_stride, k_scale_ptr if SCALES == "none" else k_scale_ptr + scale_at,
        v_scale_ptr if SCALES == "none" else v_scale_ptr + scale_at,
        block_tables_ptr + seq.to(tl.int64) * table_stride, draft_positions_ptr, first, start, end, lowest,
        context_len, query_len, scale, soft_cap, block_stride, slot_stride, scale_block_stride, HEAD_DIM, BLOCK_D,
        BLOCK_SIZE, WINDOW, SINK_TOKENS, SOFT_CAP, alibi_ptr is not None, TREE, SCALES, FORMAT, TILE,
    )  # fmt: skip
    heads = tl.num_programs(1) * GROUP
    if SHORT & (num_splits > 1):
        partial = (((seq - first_seq).to(tl.int64) * split_query + token) * heads + head) * tl.num_programs(2) + split
        partial = partial_ptr + partial * (HEAD_DIM + 2)
        tl.store(partial[:, None] + d[None, :], acc, mask=tile_mask)
        tl.store(partial + HEAD_DIM, row_max, mask=row_mask)
        tl.store(partial + HEAD_DIM + 1, divisor, mask=row_mask)
    else:
        acc = acc / tl.where(divisor == 0.0, 1.0, divisor)[:, None]  # a row that sees nothing gives zeros
        out = out_ptr + (token_index * heads + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=tile_mask)


@triton.jit(do_not_specialize=["first_seq", "grid_splits"])
def _paged_attention_reduce(
    partial_ptr: tl.tensor,  # [seqs of the round, split_query, heads, grid_splits, HEAD_DIM + 2]
    out_ptr: tl.tensor,  # [tokens, heads, HEAD_DIM]
    cu_query_lens_ptr: tl.tensor,  # [seqs + 1]
    seq_lens_ptr: tl.tensor,  # [seqs]
    first_seq: tl.tensor,
    grid_splits: tl.tensor,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, SINK_TOKENS: tl.constexpr,
    TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program a (sequence, query token, head): adds up what the splits of its context have left."""
    seq = first_seq + tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    _, _, num_splits = split_range(query_len, seq_len, WINDOW, SINK_TOKENS, TILE, MIN_SPLIT, MAX_SPLITS)
    if (query_len > _MAX_SHORT) | (token >= query_len) | (num_splits <= 1):
        return
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    d = tl.arange(0, BLOCK_D)
    row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + token) * tl.num_programs(2) + head
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
    operands: Operands,
    max_short_query: int,
    max_long_query: int,
    scale: float,
    window: int,
    num_sink_tokens: int,
    soft_cap: float,
    architecture: str | None = None,
) -> list[Launch]:
    """What one call starts, in order.

    max_short_query, max_long_query: at least the longest query of up to SPLIT_QUERY tokens, and of more; 0: none.
    Short sequences come in rounds that share one workspace of at most WORKSPACE_BYTES (or one sequence's), made here.
    """
    architecture = architecture or architecture_of(operands.query.device)
    arguments = _arguments(operands, scale, window, num_sink_tokens, soft_cap)
    launches = _launch_short(arguments, max_short_query, architecture) if max_short_query else []
    if max_long_query:
        config, tiles = _choose("paged_attention_long", arguments, architecture)
        tokens, kv_heads = operands.query.shape[0], operands.k_cache.shape[1]
        num_tiles = tokens // (tiles["BLOCK_M"] // arguments["GROUP"]) + arguments["num_seqs"]
        unused = {"partial_ptr": operands.out, "MIN_SPLIT": 1, "MAX_SPLITS": 1}
        long = {**arguments, **tiles, **unused, "SHORT": False}
        launches.append(Launch(_paged_attention, (num_tiles, kv_heads), long, config.num_warps, config.num_stages))
    return launches


def _arguments(o: Operands, scale: float, window: int, num_sink_tokens: int, soft_cap: float) -> dict[str, Any]:
    """Those that all launches of a call share."""
    scales = scales_of(o.k_scale)
    strides = (0, 0)  # over blocks and KV heads
    if o.k_scale is not None and scales != "tensor":
        strides = (o.k_scale.stride(0), o.k_scale.stride(1)) if scales == "token" else (0, o.k_scale.stride(0))
    return {
        "query_ptr": o.query,
        "k_ptr": as_bits(o.k_cache),
        "v_ptr": as_bits(o.v_cache),
        "out_ptr": o.out,
        "block_tables_ptr": o.block_tables,
        "cu_query_lens_ptr": o.cu_query_lens,
        "seq_lens_ptr": o.seq_lens,
        "k_scale_ptr": o.k_scale,
        "v_scale_ptr": o.v_scale,
        "sinks_ptr": o.sinks,
        "alibi_ptr": o.alibi_slopes,
        "ancestors_ptr": o.ancestors,
        "positions_ptr": o.positions,
        "first_seq": 0,
        "num_seqs": o.seq_lens.shape[0],
        "tiles_per_seq": 1,
        "split_query": 1,
        "scale": scale,
        "soft_cap": soft_cap,
        "query_stride": o.query.stride(0),
        "query_head_stride": o.query.stride(1),
        "block_stride": o.k_cache.stride(0),
        "head_stride": o.k_cache.stride(1),
        "slot_stride": o.k_cache.stride(2),
        "table_stride": o.block_tables.stride(0),
        "scale_block_stride": strides[0],
        "scale_head_stride": strides[1],
        "GROUP": o.query.shape[1] // o.k_cache.shape[1],
        "HEAD_DIM": o.query.shape[2],
        "BLOCK_D": triton.next_power_of_2(o.query.shape[2]),
        "BLOCK_SIZE": o.k_cache.shape[2],
        "WINDOW": window,
        "SINK_TOKENS": num_sink_tokens,
        "SOFT_CAP": soft_cap > 0,
        "SCALES": scales,
        "FORMAT": format_of(o.k_cache.dtype),
    }


def _choose(kind: str, arguments: dict[str, Any], architecture: str) -> tuple[Config, dict[str, int]]:
    """The configuration, and its tiles with BLOCK_M at least one token's heads."""
    query, group = arguments["query_ptr"], arguments["GROUP"]
    config = choose(kind, architecture, itemsize=query.element_size(), size=arguments["BLOCK_D"])
    return config, {**config.tiles, "BLOCK_M": max(config.tiles["BLOCK_M"], triton.next_power_of_2(group))}


def _launch_short(arguments: dict[str, Any], max_query: int, architecture: str) -> list[Launch]:
    """The rounds of short sequences. The grid has as many splits as the widest block table can fill."""
    tokens, heads, head_dim = arguments["query_ptr"].shape
    kv_heads, num_seqs = heads // arguments["GROUP"], arguments["num_seqs"]
    config, tiles = _choose("paged_attention_short", arguments, architecture)
    splitting = choose("paged_attention_splits", architecture).tiles
    wanted = triton.next_power_of_2(128 // kv_heads)  # to keep a large GPU busy with one sequence
    rows = triton.next_power_of_2(arguments["GROUP"] * max_query)
    tiles |= {
        "BLOCK_M": min(tiles["BLOCK_M"], max(16, rows)),  # no wider than the rows that there are
        "MIN_SPLIT": max(splitting["MIN_SPLIT"], tiles["TILE"]),
        "MAX_SPLITS": min(max(wanted, 8), splitting["MAX_SPLITS"]),
    }
    max_context = arguments["block_tables_ptr"].shape[1] * arguments["BLOCK_SIZE"]
    splits = max(1, min(tiles["MAX_SPLITS"], triton.cdiv(max_context, tiles["MIN_SPLIT"])))
    per_seq = max_query * heads * splits * (head_dim + 2)
    seqs = min(num_seqs, max(1, WORKSPACE_BYTES // (4 * per_seq)))
    tiles_per_seq = triton.cdiv(max_query, tiles["BLOCK_M"] // arguments["GROUP"])
    size = seqs * per_seq if splits > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=arguments["query_ptr"].device)
    launches = []
    for first_seq in range(0, num_seqs, seqs):
        count = min(seqs, num_seqs - first_seq)
        this_round = {
            **arguments, **tiles, "partial_ptr": partial, "first_seq": first_seq, "tiles_per_seq": tiles_per_seq,
            "split_query": max_query, "grid_splits": splits, "SHORT": True,
        }  # fmt: skip
        grid = (count * tiles_per_seq, kv_heads, splits)
        launches.append(_launch(_paged_attention, grid, this_round, config.num_warps, config.num_stages))
        if splits > 1:
            launches.append(_launch(_paged_attention_reduce, (count, max_query, heads), this_round, 4, 1))
    return launches


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int, num_stages: int) -> Launch:
    """With those of `arguments` that the kernel has."""
    names = set(kernel.arg_names)
    kept = {name: value for name, value in arguments.items() if name in names}
    return Launch(kernel, grid, kept, num_warps, num_stages)
