"""Formulas of the attention kernels. Variables have the names that the kernels give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereid_kernels.cost.cost import Cost
from nereid_kernels.splitting import SPLIT_QUERY


@dataclass(frozen=True, slots=True)
class _Part:
    """One program of an attention kernel that has work, within its sequence. rows: query tokens x the heads that share
    keys.  keys: apart from each other.  tiles: of keys, which it multiplies by.  is_whole: it writes its result itself,
    since its sequence is not split."""

    rows: range
    keys: tuple[range, ...]
    tiles: int
    is_whole: bool


def _attend(parts: Sequence[_Part], row: int, key: int, stored: Callable[[_Part], int], flops: int) -> Cost:
    """Of one sequence. row, key: bytes of one.  stored: bytes that a part writes.  flops: of a tile of keys."""
    written = sum(map(stored, parts))
    keys = [keys for part in parts for keys in part.keys]
    return Cost(
        loaded=sum(len(part.rows) for part in parts) * row + sum(map(len, keys)) * key,
        stored=written,
        distinct=_union(part.rows for part in parts) * row + _union(keys) * key + written,
        flops=sum(part.tiles for part in parts) * flops,
    )


def _union(ranges: Iterable[range]) -> int:
    """How many numbers lie in at least one of them."""
    size, reached = 0, 0
    for numbers in sorted(ranges, key=lambda r: r.start):
        size += max(numbers.stop - max(numbers.start, reached), 0)
        reached = max(reached, numbers.stop)
    return size


def _lengths(a: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each sequence."""
    bounds: list[int] = a["cu_query_lens_ptr"].tolist()
    seq_lens: list[int] = a["seq_lens_ptr"].tolist()
    return [(bounds[seq + 1] - bounds[seq], seq_len) for seq, seq_len in enumerate(seq_lens)]


def _ceil(value: int, step: int) -> int:
    """The multiple of step that is not below value."""
    return -(-value // step) * step


# ---- paged_attention


def _paged_seqs(a: Mapping[str, Any], num_seqs: int) -> Iterator[tuple[int, int]]:
    """(query_len, seq_len) of the sequences of a round that splits them, num_seqs in number."""
    first = a["first_seq"]
    return ((query, keys) for query, keys in _lengths(a)[first : first + num_seqs] if query <= SPLIT_QUERY)


def _first_place(a: Mapping[str, Any], lowest: int) -> int:
    """Where the range of places begins, by windows that begin at `lowest`."""
    tile: int = a["TILE"]
    return max(lowest // tile * tile - _ceil(a["SINK_TOKENS"], tile), 0)


def _paged_split_range(a: Mapping[str, Any], query_len: int, seq_len: int) -> tuple[int, int, int]:
    """(first place, places a split, number of splits)."""
    window, tile = a["WINDOW"], a["TILE"]
    first = _first_place(a, max(seq_len - query_len - window + 1, 0)) if window else 0
    length = seq_len - first
    per_split = max(_ceil(-(-length // a["MAX_SPLITS"]), tile), a["MIN_SPLIT"])
    return first, per_split, -(-length // per_split)


def _paged_parts(a: Mapping[str, Any], query_len: int, seq_len: int) -> Iterator[_Part]:
    """Of one KV head. With sinks, the first places of a range are theirs, wherever the window's begin."""
    group, window, tile, sinks = a["GROUP"], a["WINDOW"], a["TILE"], a["SINK_TOKENS"]
    is_tree, context_len = a["ancestors_ptr"] is not None, seq_len - query_len
    first, per_split, num_splits = _paged_split_range(a, query_len, seq_len) if a["SHORT"] else (0, seq_len, 1)
    block_q = a["BLOCK_M"] // group
    for token in range(0, query_len, block_q):
        last_token = min(token + block_q, query_len)
        lowest = max(context_len + (0 if is_tree else token) - window + 1, 0) if window else 0
        highest = seq_len if is_tree else context_len + last_token
        if not a["SHORT"]:
            first = _first_place(a, lowest)
        for split in range(max(num_splits, 1)):
            start, end = first + split * per_split, min(first + (split + 1) * per_split, highest)
            if not sinks:
                start = max(start, lowest // tile * tile)
            keys = range(max(start, lowest), max(start, lowest, end))
            sink_keys = range(start - first, max(min(end - first, sinks, lowest), start - first))
            tiles = max(-(-(end - start) // tile), 0)
            yield _Part(range(token * group, last_token * group), (sink_keys, keys), tiles, num_splits <= 1)


def paged_attention(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    head_dim, kv_heads = a["HEAD_DIM"], grid[1]
    row, key = head_dim * a["query_ptr"].element_size(), 2 * head_dim * a["k_ptr"].element_size()
    key += 8 if a["SCALES"] == "token" else 0
    whole, partial = head_dim * a["out_ptr"].element_size(), 4 * (head_dim + 2)
    flops = 2 * (2 * a["BLOCK_M"] * a["TILE"] * a["BLOCK_D"])
    total = Cost()
    long = ((query, keys) for query, keys in _lengths(a) if query > SPLIT_QUERY)
    for query_len, seq_len in _paged_seqs(a, grid[0] // a["tiles_per_seq"]) if a["SHORT"] else long:
        parts = list(_paged_parts(a, query_len, seq_len))
        cost = _attend(parts, row, key, lambda p: len(p.rows) * (whole if p.is_whole else partial), flops)
        total += (cost + Cost(loaded=_per_head_bytes(a, parts))).times(kv_heads)
    per_head = sum(4 * kv_heads * a["GROUP"] for name in ("alibi_ptr", "sinks_ptr") if a[name] is not None)
    return total + Cost(distinct=per_head + {"tensor": 8, "head": 8 * kv_heads}.get(a["SCALES"], 0))


def _per_head_bytes(a: Mapping[str, Any], parts: Sequence[_Part]) -> int:
    """Scales of K and V, slopes and sinks that the programs of one sequence and one KV head load."""
    scales = 8 * len(parts) if a["SCALES"] in ("tensor", "head") else 0
    slopes = 0 if a["alibi_ptr"] is None else 4 * sum(len(part.rows) for part in parts)
    sinks = 0 if a["sinks_ptr"] is None else 4 * _union(part.rows for part in parts)  # by first splits alone
    return scales + slopes + sinks


def paged_attention_reduce(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    heads, head_dim, total = grid[2], a["HEAD_DIM"], Cost()
    for query_len, seq_len in _paged_seqs(a, grid[0]):
        num_splits = _paged_split_range(a, query_len, seq_len)[2]
        if num_splits > 1:
            loaded = query_len * heads * num_splits * 4 * (head_dim + 2)
            stored = query_len * heads * head_dim * a["out_ptr"].element_size()
            total += Cost(loaded, stored, loaded + stored)
    return total


# ---- mla_attention


def _mla_tiles(a: Mapping[str, Any], grid: tuple[int, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """(sequence, its query_len and seq_len, first row, keys a split) of each tile of rows that this launch works on."""
    lengths = _lengths(a)
    if a["SHORT"]:
        numbers = range(a["first_tile"], a["first_tile"] + grid[0])
        tiles = [(n // a["tiles_per_seq"], n % a["tiles_per_seq"]) for n in numbers]
    else:
        tiles = [(s, n) for s, (q, _) in enumerate(lengths) for n in range(-(-q * a["HEADS"] // a["BLOCK_M"]))]
    for seq, tile in tiles:
        query_len, seq_len = lengths[seq]
        is_ours = (query_len <= SPLIT_QUERY) == a["SHORT"]
        if is_ours and tile * a["BLOCK_M"] < query_len * a["HEADS"]:
            per_split = _ceil(-(-seq_len // a["MAX_SPLITS"]), a["BLOCK_N"])
            split = max(a["MIN_SPLIT"], per_split) if a["SHORT"] else max(seq_len, 1)
            yield seq, query_len, seq_len, tile * a["BLOCK_M"], split


def mla_attention(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    width, latent, heads, block_m = a["LATENT"] + a["ROPE"], a["LATENT"], a["HEADS"], a["BLOCK_M"]
    row, key = width * a["query_ptr"].element_size(), width * a["cache_ptr"].element_size()
    out = latent * a["out_ptr"].element_size()
    flops = 2 * block_m * a["BLOCK_N"] * (2 * a["LATENT_PADDED"] + a["ROPE_PADDED"])
    parts: dict[int, list[_Part]] = {}
    for seq, query_len, seq_len, first_row, split in _mla_tiles(a, grid):
        rows = range(first_row, min(first_row + block_m, query_len * heads))
        seen = min(seq_len, seq_len - query_len + (first_row + block_m - 1) // heads + 1)
        for start in range(0, max(seq_len, 1), split):
            keys = range(start, max(start, min(seen, start + split)))
            tiles = -(-len(keys) // a["BLOCK_N"])
            parts.setdefault(seq, []).append(_Part(rows, (keys,), tiles, split >= seq_len))

    def stored(part: _Part) -> int:
        return int(len(part.rows) * out if part.is_whole else 4 * (len(part.rows) * latent + 2 * block_m))

    return sum((_attend(found, row, key, stored, flops) for found in parts.values()), Cost())


def mla_attention_reduction(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    latent, total = a["LATENT"], Cost()
    for _, query_len, seq_len, first_row, split in _mla_tiles({**a, "SHORT": True}, grid):
        if split < seq_len:
            rows, num_splits = min(query_len * a["HEADS"] - first_row, a["BLOCK_M"]), -(-seq_len // split)
            numbers, sums = 4 * num_splits * _ceil(rows, a["BLOCK_ROWS"]), 4 * num_splits * rows * latent
            stored = rows * latent * a["out_ptr"].element_size()
            # Two numbers a row and split, the largest score and the sum; the scores are read twice.
            total += Cost(3 * numbers + sums, stored, 2 * numbers + sums + stored)
    return total
