"""The kernels of mla_attention, and the launches that one call takes.

All heads share one latent row a key, so a sequence's (query token, head) pairs are packed into rows, token-major, and
tiles of BLOCK_M rows read each latent tile once: it is the key, and its first LATENT columns are the value.

A sequence of up to SPLIT_QUERY query tokens is short: its keys are split among programs, whose parts
`_mla_attention_reduction` adds up. How it is split follows from its seq_len alone, so that its result does not depend
on the batch. Longer queries have tiles enough, and one program goes through all keys of a tile. One call may hold both
kinds; each has a launch of its own, which passes over the other's sequences.

Which program does what. Long: the grid has tokens * heads // BLOCK_M + seqs tiles, and each program searches
cu_query_lens for its sequence; a grid of seqs x (tiles of the longest query) would start some hundred thousand idle
programs for one long prompt among decodes. Short: that product is small, and needs no search.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Config, Launch, architecture_of, choose
from nereid_kernels.splitting import SPLIT_QUERY
from nereid_kernels.triton_lang.paging import find_tile, load_block_ids, split_length

WORKSPACE_BYTES = 256 << 20  # the parts of one round of tiles; enough for several programs a multiprocessor
_LOG2_E = 1.4426950408889634


@triton.jit
def _load_columns(
    pointers: tl.tensor, is_row: tl.tensor, first: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """Columns first .. first + SIZE of the rows at `pointers`, [rows, PADDED]; 0 outside. Without padding the mask
    is by row alone, so that loads stay 16 bytes wide."""
    columns = tl.arange(0, PADDED)
    mask = is_row[:, None] if SIZE == PADDED else is_row[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointers[:, None] + first + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    query_ptr: tl.tensor,  # [tokens, heads, LATENT + ROPE], at the sequence's first token
    cache_ptr: tl.tensor,  # [block, slot, LATENT + ROPE]
    block_table_ptr: tl.tensor,  # [max_blocks], the sequence's
    first_row: tl.tensor,
    num_rows: tl.tensor,
    first_position: tl.tensor,  # of the sequence's first query token
    first_key: tl.tensor,
    last_key: tl.tensor,  # exclusive
    scale_log2: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    cache_block_stride: tl.tensor,
    cache_slot_stride: tl.tensor,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Softmax attention of the rows over keys first_key .. last_key: the largest score (log2) [BLOCK_M], the sum of
    2 ** (score - largest) [BLOCK_M], and the values weighted by that [BLOCK_M, LATENT_PADDED]; all float32."""
    rows = first_row + tl.arange(0, BLOCK_M)
    query_rows = (rows // HEADS).to(tl.int64) * query_token_stride + (rows % HEADS) * query_head_stride
    query = _load_columns(query_ptr + query_rows, rows < num_rows, 0, LATENT, LATENT_PADDED)
    query_rope = _load_columns(query_ptr + query_rows, rows < num_rows, LATENT, ROPE, ROPE_PADDED)
    query_positions = first_position + rows // HEADS

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT_PADDED], tl.float32)
    # A tile's block ids are read one iteration ahead, so that its latents can be fetched while the last tile is used.
    blocks = load_block_ids(block_table_ptr, first_key, last_key, BLOCK_SIZE, BLOCK_N)
    for start in range(first_key, last_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < last_key  # what lies past the end, maybe NaN, is never read
        block_ptrs = cache_ptr + blocks.to(tl.int64) * cache_block_stride
        pointers = block_ptrs + keys % BLOCK_SIZE * cache_slot_stride
        latent = _load_columns(pointers, is_key, 0, LATENT, LATENT_PADDED)
        rope = _load_columns(pointers, is_key, LATENT, ROPE, ROPE_PADDED)
        blocks = load_block_ids(block_table_ptr, start + BLOCK_N, last_key, BLOCK_SIZE, BLOCK_N)

        scores = tl.dot(query, latent.T, input_precision=PRECISION)
        scores = tl.dot(query_rope, rope.T, scores, input_precision=PRECISION) * scale_log2
        is_seen = is_key[None, :] & (keys[None, :] <= query_positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet: no inf - inf
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision=PRECISION)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _mean(acc: tl.tensor, row_sum: tl.tensor) -> tl.tensor:
    """acc / row_sum by row; 0 where a row has seen no key."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def _store_tile(
    tile_ptr: tl.tensor,  # [BLOCK_M, LATENT], contiguous
    num_rows: tl.tensor,  # that are stored
    values: tl.tensor,  # [BLOCK_M, LATENT_PADDED]
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, LATENT_PADDED)
    mask = (rows < num_rows)[:, None] & (columns < LATENT)[None, :]
    tl.store(tile_ptr + rows[:, None] * LATENT + columns[None, :], values.to(tile_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "first_tile", "tiles_per_seq", "block_tables_stride"])
def _mla_attention(
    query_ptr: tl.tensor,  # [tokens, HEADS, LATENT + ROPE]
    cache_ptr: tl.tensor,  # [block, 1, BLOCK_SIZE, LATENT + ROPE]
    block_tables_ptr: tl.tensor,  # [seqs, max_blocks]
    cu_query_lens_ptr: tl.tensor,  # [seqs + 1]
    seq_lens_ptr: tl.tensor,  # [seqs]
    out_ptr: tl.tensor,  # [tokens, HEADS, LATENT], contiguous
    max_ptr: tl.tensor,  # [tiles of the grid, splits of the grid, BLOCK_M]; with SHORT, as the next four
    sum_ptr: tl.tensor,  # as max_ptr
    acc_ptr: tl.tensor,  # [tiles of the grid, splits of the grid, BLOCK_M, LATENT]
    first_tile: tl.tensor,
    tiles_per_seq: tl.tensor,
    num_seqs: tl.tensor,
    scale_log2: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    cache_block_stride: tl.tensor,
    cache_slot_stride: tl.tensor,
    block_tables_stride: tl.tensor,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, SPLIT_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SHORT: tl.constexpr,  # whether this launch is for sequences of up to SPLIT_QUERY query tokens, or for the rest
) -> None:  # fmt: skip
    if SHORT:
        seq = (first_tile + tl.program_id(0)) // tiles_per_seq
        tile = (first_tile + tl.program_id(0)) % tiles_per_seq
    else:  # backwards: a query's last tile has most keys to see
        last = tl.num_programs(0) - 1
        seq, tile = find_tile(cu_query_lens_ptr, last - tl.program_id(0), num_seqs, HEADS, BLOCK_M)
    first_token = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + seq)
    first_row = tile * BLOCK_M
    num_rows = query_len * HEADS
    per_split = split_length(seq_len, MIN_SPLIT, MAX_SPLITS, BLOCK_N) if SHORT else seq_len
    first_key = tl.program_id(1) * per_split
    is_others = query_len > SPLIT_QUERY if SHORT else query_len <= SPLIT_QUERY
    # A sequence without keys is the first split's, which writes zeros.
    if is_others | (first_row >= num_rows) | ((first_key >= seq_len) & (first_key > 0)):
        return

    first_position = seq_len - query_len
    last_seen = tl.minimum(seq_len, first_position + (first_row + BLOCK_M - 1) // HEADS + 1)
    row_max, row_sum, acc = _attend(
        query_ptr + first_token.to(tl.int64) * query_token_stride, cache_ptr,
        block_tables_ptr + seq.to(tl.int64) * block_tables_stride, first_row, num_rows, first_position, first_key,
        tl.minimum(last_seen, first_key + per_split), scale_log2, query_token_stride, query_head_stride,
        cache_block_stride, cache_slot_stride, HEADS, LATENT, ROPE, LATENT_PADDED, ROPE_PADDED, BLOCK_SIZE, PRECISION,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out_ptr += (first_token.to(tl.int64) * HEADS + first_row) * LATENT
    if SHORT:
        if per_split < seq_len:
            part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_M
            tl.store(max_ptr + part + tl.arange(0, BLOCK_M), row_max)
            tl.store(sum_ptr + part + tl.arange(0, BLOCK_M), row_sum)
            _store_tile(acc_ptr + part * LATENT, num_rows - first_row, acc, LATENT, LATENT_PADDED, BLOCK_M)
        else:  # the only split: nothing to add up
            _store_tile(out_ptr, num_rows - first_row, _mean(acc, row_sum), LATENT, LATENT_PADDED, BLOCK_M)
    else:
        _store_tile(out_ptr, num_rows - first_row, _mean(acc, row_sum), LATENT, LATENT_PADDED, BLOCK_M)


@triton.jit(do_not_specialize=["first_tile", "tiles_per_seq", "grid_splits"])
def _mla_attention_reduction(
    cu_query_lens_ptr: tl.tensor,  # [seqs + 1]
    seq_lens_ptr: tl.tensor,  # [seqs]
    out_ptr: tl.tensor,  # [tokens, HEADS, LATENT], contiguous
    max_ptr: tl.tensor,  # [tiles of the grid, grid_splits, BLOCK_M]
    sum_ptr: tl.tensor,  # as max_ptr
    acc_ptr: tl.tensor,  # [tiles of the grid, grid_splits, BLOCK_M, LATENT]
    first_tile: tl.tensor,
    tiles_per_seq: tl.tensor,
    grid_splits: tl.tensor,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, SPLIT_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # divides BLOCK_M
) -> None:  # fmt: skip
    """BLOCK_ROWS rows a program; the parts are added in the order of their keys."""
    seq = (first_tile + tl.program_id(0)) // tiles_per_seq
    first_token = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + seq)
    first_row = (first_tile + tl.program_id(0)) % tiles_per_seq * BLOCK_M + tl.program_id(1) * BLOCK_ROWS
    num_rows = query_len * HEADS
    per_split = split_length(seq_len, MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    if (query_len > SPLIT_QUERY) | (first_row >= num_rows) | (per_split >= seq_len):
        return
    num_splits = tl.cdiv(seq_len, per_split)
    rows = tl.arange(0, BLOCK_ROWS)
    first_parts = tl.program_id(0).to(tl.int64) * grid_splits * BLOCK_M + tl.program_id(1) * BLOCK_ROWS + rows
    row_max = tl.load(max_ptr + first_parts)  # finite: a context that is split is longer than its query
    for split in range(1, num_splits):
        row_max = tl.maximum(row_max, tl.load(max_ptr + first_parts + split * BLOCK_M))

    columns = tl.arange(0, LATENT_PADDED)
    mask = (rows < num_rows - first_row)[:, None] & (columns < LATENT)[None, :]
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, LATENT_PADDED], tl.float32)
    for split in range(num_splits):
        parts = first_parts + split * BLOCK_M
        decay = tl.exp2(tl.load(max_ptr + parts) - row_max)
        row_sum += tl.load(sum_ptr + parts) * decay
        acc += tl.load(acc_ptr + parts[:, None] * LATENT + columns[None, :], mask=mask, other=0.0) * decay[:, None]
    out_ptr += (first_token.to(tl.int64) * HEADS + first_row) * LATENT
    _store_tile(out_ptr, num_rows - first_row, acc / row_sum[:, None], LATENT, LATENT_PADDED, BLOCK_ROWS)


def launch_mla_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    max_query_len: int,
    scale: float,
    architecture: str | None = None,
) -> list[Launch]:
    """What one call starts, in order; shapes as in `nereid_kernels.mla_attention`, out: [tokens, heads, latent].

    Short queries come in rounds that share one workspace of at most WORKSPACE_BYTES (or one tile's parts), which is
    made here: two launches each. How many depends on shapes and max_query_len alone.
    architecture: the tensors' device's own, unless it is compiled for another.
    """
    architecture = architecture or architecture_of(query.device)
    tokens, heads, _ = query.shape
    if not (tokens and seq_lens.numel() and max_query_len):
        return []
    common = {
        "query_ptr": query,
        "cache_ptr": cache,
        "block_tables_ptr": block_tables,
        "cu_query_lens_ptr": cu_query_lens,
        "seq_lens_ptr": seq_lens,
        "out_ptr": out,
        "num_seqs": seq_lens.shape[0],
        "scale_log2": scale * _LOG2_E,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "cache_block_stride": cache.stride(0),
        "cache_slot_stride": cache.stride(2),
        "block_tables_stride": block_tables.stride(0),
        **_constants(query, cache, out),
    }
    launches = _launch_short(common, max_query_len, architecture)
    if max_query_len > SPLIT_QUERY:
        config = choose("mla_attention_long", architecture, itemsize=query.element_size(), size=heads)
        unused = dict.fromkeys(("max_ptr", "sum_ptr", "acc_ptr"))
        unused_numbers = dict.fromkeys(("first_tile", "tiles_per_seq", "MIN_SPLIT", "MAX_SPLITS"), 1)
        arguments = {**common, **config.tiles, **unused, **unused_numbers, "SHORT": False}
        grid = (tokens * heads // config.tiles["BLOCK_M"] + seq_lens.shape[0],)
        launches.append(Launch(_mla_attention, grid, arguments, config.num_warps, config.num_stages))
    return launches


def _constants(query: Tensor, cache: Tensor, out: Tensor) -> dict[str, Any]:
    latent, rope = out.shape[2], query.shape[2] - out.shape[2]
    return {
        "HEADS": query.shape[1],
        "LATENT": latent,
        "ROPE": rope,
        "LATENT_PADDED": max(16, triton.next_power_of_2(latent)),  # no matrix product is narrower
        "ROPE_PADDED": max(16, triton.next_power_of_2(rope)),
        "BLOCK_SIZE": cache.shape[2],
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "SPLIT_QUERY": SPLIT_QUERY,
    }


def _launch_short(common: dict[str, Any], max_query_len: int, architecture: str) -> list[Launch]:
    """The rounds of short sequences' launches, of a grid with as many splits as the widest block table can fill."""
    query, heads, latent = common["query_ptr"], common["HEADS"], common["LATENT"]
    config = choose("mla_attention_short", architecture, itemsize=query.element_size(), size=heads)
    reduction = choose("mla_attention_reduction", architecture)
    tiles, block_m = config.tiles, config.tiles["BLOCK_M"]
    num_seqs, max_blocks = common["block_tables_ptr"].shape
    widest = triton.cdiv(max_blocks * common["BLOCK_SIZE"], tiles["MIN_SPLIT"])
    splits = max(1, min(tiles["MAX_SPLITS"], widest))
    tiles_per_seq = triton.cdiv(min(max_query_len, SPLIT_QUERY) * heads, block_m)
    num_tiles = num_seqs * tiles_per_seq
    round_tiles = min(num_tiles, max(1, WORKSPACE_BYTES // (splits * block_m * (latent + 2) * 4)))
    arguments = {**common, **tiles, **_workspace(round_tiles * splits * block_m, latent, query.device)}
    arguments |= {"tiles_per_seq": tiles_per_seq, "SHORT": True}
    launches = []
    for first_tile in range(0, num_tiles, round_tiles):
        grid = (min(round_tiles, num_tiles - first_tile), splits)
        this_round = {**arguments, "first_tile": first_tile}
        launches.append(Launch(_mla_attention, grid, this_round, config.num_warps, config.num_stages))
        if splits > 1:
            launches.append(_launch_reduction(this_round, reduction, grid))
    return launches


def _launch_reduction(arguments: dict[str, Any], config: Config, grid: tuple[int, int]) -> Launch:
    """Of the round whose other launch has these arguments and this grid."""
    tiles, splits = grid
    names = set(_mla_attention_reduction.arg_names)
    kept = {name: value for name, value in arguments.items() if name in names}
    programs = (tiles, arguments["BLOCK_M"] // config.tiles["BLOCK_ROWS"])
    return Launch(
        _mla_attention_reduction,
        programs,
        {**kept, **config.tiles, "grid_splits": splits},
        config.num_warps,
        config.num_stages,
    )


def _workspace(rows: int, latent: int, device: torch.device) -> dict[str, Tensor]:
    row_max, row_sum = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    acc = torch.empty(rows, latent, dtype=torch.float32, device=device)
    return {"max_ptr": row_max, "sum_ptr": row_sum, "acc_ptr": acc}
