"""What kernels over a paged cache share: whose tile a program has, how a context is split, where its blocks lie."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(
    cu_query_lens_ptr: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, ROWS: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """The sequence that a tile of the grid belongs to, and which of its tiles it is. A query token has ROWS rows, a
    tile BLOCK_M. Sequence s has its first tile at cu_query_lens[s] * ROWS // BLOCK_M + s, which leaves it as many tiles
    as it needs or one more, so that the size of the grid follows from the shapes alone."""
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(cu_query_lens_ptr + middle) * ROWS // BLOCK_M + middle > tile
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low, tile - (tl.load(cu_query_lens_ptr + low) * ROWS // BLOCK_M + low)


@triton.jit
def split_length(
    num_keys: tl.tensor, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Keys a split, whole tiles of BLOCK_N; at most MAX_SPLITS of them cover num_keys."""
    return tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), BLOCK_N) * BLOCK_N)


@triton.jit
def load_block_ids(
    block_table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    lowest: tl.tensor = 0,
    SINK_TOKENS: tl.constexpr = 0,
) -> tl.tensor:
    """Of keys start .. start + BLOCK_N, where start is a multiple of BLOCK_N; 0 before `lowest`, but for the first
    SINK_TOKENS, and from `end` on. One number where no tile crosses a block (which saves registers), else [BLOCK_N]."""
    if BLOCK_SIZE % BLOCK_N == 0:  # `lowest` lies within the first tile, and so within its block
        return tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        is_seen = (keys < end) & is_kept(keys, lowest, SINK_TOKENS)
        return tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=is_seen, other=0)


# Windows with attention sinks: a sequence's first SINK_TOKENS keys are seen besides the window's. They are read in the
# places before the window's first tile, so that a range of places holds tiles that are read and no other.


@triton.jit
def is_kept(keys: tl.tensor, lowest: tl.tensor, SINK_TOKENS: tl.constexpr) -> tl.tensor:
    """Whether some query sees them: what lies between may be another's by now, or NaN."""
    if SINK_TOKENS > 0:
        return (keys >= lowest) | (keys < SINK_TOKENS)
    else:
        return keys >= lowest


@triton.jit
def first_place(lowest: tl.tensor, SINK_TOKENS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Where the range begins for windows that begin at `lowest`; a multiple of TILE."""
    start = lowest // TILE * TILE
    if SINK_TOKENS > 0:
        return tl.maximum(start - tl.cdiv(SINK_TOKENS, TILE) * TILE, 0)
    else:
        return start


@triton.jit
def key_at(place: tl.tensor, first: tl.tensor, SINK_TOKENS: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The first key of the tile at `place` in a range that begins at `first`."""
    if SINK_TOKENS > 0:
        return tl.where(place < first + tl.cdiv(SINK_TOKENS, TILE) * TILE, place - first, place)
    else:
        return place


@triton.jit
def split_range(
    query_len: tl.tensor,
    seq_len: tl.tensor,
    WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> tl.tensor:
    """(where the range begins that its query tokens see, see paging; keys a split; number of splits)."""
    first = 0
    if WINDOW > 0:
        first = first_place(tl.maximum(seq_len - query_len - WINDOW + 1, 0), SINK_TOKENS, TILE)
    per_split = split_length(seq_len - first, MIN_SPLIT, MAX_SPLITS, TILE)
    return first, per_split, tl.cdiv(seq_len - first, per_split)
