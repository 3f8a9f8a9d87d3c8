"""paged_attention on the CPU.

Each sequence's keys and values are gathered by slot (see `stored.py`), and the queries of one KV head are folded into
the query length of scaled_dot_product_attention, so that grouped-query attention reads each key and value once.
Sequences with one query token and contexts of like length share one call. What a call needs to know about slots and
masks is worked out once a step, for all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nereid_kernels.cpu.layout import row_index
from nereid_kernels.cpu.stored import Stored, read
from nereid_kernels.splitting import MAX_TREE

_KEY_TILE = 256
_CALL_TOKENS = 1 << 11  # of the contexts of decodes that share a call, for each thread: what is gathered stays small
_ROWS = 4
_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of one query length that share a call: n sequences, q query tokens each, at most c context tokens.

    query_rows: [n * q] rows of the step's queries.  context_rows: [n, kv_heads, c] rows of a layer's view; a slot past
    a sequence's end points to its last slot, which is finite, and is masked.  seen: [n, 1, q, c] bool.
    distance: [n, 1, q, c] int64, how many positions a key lies behind its query.  key_positions: [c] int64.
    last: [n] each one's last slot.  scale_rows: as context_rows, of a layer's scales; None where there is not one for
    each token.
    """

    query_rows: Tensor
    context_rows: Tensor
    seen: Tensor
    distance: Tensor
    key_positions: Tensor
    last: Tensor
    scale_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class Features:
    """What a layer's attention has beyond causal masking; see the wrapper. Deterministic: see `_attend_by_tiles`."""

    window: int = 0
    num_sink_tokens: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """Which of a sequence's query tokens see each other; see the wrapper. ancestors, positions: [tokens] int64."""

    ancestors: Tensor
    positions: Tensor


def plan_buckets(
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[Tensor],
    cache: Tensor,
    token_scale: Tensor | None = None,
    tree: Tree | None = None,
) -> tuple[Bucket, ...]:
    """The calls of one step. block_tables: by sequence, at least as many block ids as the sequence needs."""
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    return tuple(
        _bucket(members, starts, query_lens, seq_lens, block_tables, cache, token_scale, tree)
        for members in _group(query_lens, seq_lens)
    )


def paged_attention(
    query: Tensor, keys: Stored, values: Stored, buckets: tuple[Bucket, ...], scale: float, features: Features
) -> Tensor:
    """[tokens, heads, head_dim], where query has that shape too."""
    output = torch.empty_like(query)
    for bucket in buckets:
        output[bucket.query_rows] = _attend(query, keys, values, bucket, scale, features)
    return output


def _attend(query: Tensor, keys: Stored, values: Stored, bucket: Bucket, scale: float, features: Features) -> Tensor:
    """[n * q, heads, head_dim]"""
    if features.window:
        bucket = _within(bucket, features.window, features.num_sink_tokens)
    n, kv_heads, _ = bucket.context_rows.shape
    q = bucket.seen.shape[2]
    heads, head_dim = query.shape[1:]
    group = heads // kv_heads
    folded = query[bucket.query_rows].view(n, q, kv_heads, group, head_dim)
    folded = folded.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, group * q, head_dim)
    k = read(keys, bucket.context_rows, bucket.scale_rows, query.dtype)  # [n, kv_heads, c, head_dim]
    v = read(values, bucket.context_rows, bucket.scale_rows, query.dtype)
    mask = _mask(bucket, kv_heads, group, features, query.dtype)
    if features.deterministic or features.soft_cap or features.sinks is not None:
        out = _attend_by_tiles(folded, k, v, mask, scale, features)
    else:
        out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(n, kv_heads, group, q, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(n * q, heads, head_dim)


def _within(bucket: Bucket, window: int, num_sink_tokens: int) -> Bucket:
    """The bucket without the slots between the first tokens and every window: they may be another's by now, or NaN."""
    q, slots = bucket.seen.shape[2], torch.arange(bucket.seen.shape[3])
    lowest = (bucket.last + 2 - q - window).clamp(min=0)[:, None, None]  # [n, 1, 1]
    sink_tiles = -(-num_sink_tokens // _KEY_TILE) * _KEY_TILE  # tiles are left out, but stay where they are
    first = max(int(lowest.min()) // _KEY_TILE * _KEY_TILE, sink_tiles)
    kept = torch.cat((slots[:sink_tiles], slots[first:])) if num_sink_tokens else slice(first, None)
    slots, positions = slots[kept], bucket.key_positions[kept]
    passed_over = (slots < lowest) & (slots >= num_sink_tokens)  # [n, 1, c]

    def within(rows: Tensor) -> Tensor:
        last = bucket.last[:, None, None].expand(-1, rows.shape[1], len(slots))
        return torch.where(passed_over, rows.gather(2, last), rows[:, :, kept])

    distance = bucket.distance[..., kept]
    return Bucket(
        bucket.query_rows,
        within(bucket.context_rows),
        bucket.seen[..., kept] & ((distance < window) | (positions < num_sink_tokens)),
        distance,
        positions,
        bucket.last,
        None if bucket.scale_rows is None else within(bucket.scale_rows),
    )


def _mask(bucket: Bucket, kv_heads: int, group: int, features: Features, dtype: torch.dtype) -> Tensor:
    """[n, 1 or kv_heads, group * q, c]: bool, true is seen; with ALiBi what is added to the scores."""
    seen = bucket.seen
    if features.alibi_slopes is None:
        return seen.repeat(1, 1, group, 1) if seen.shape[2] > 1 else seen
    slopes = features.alibi_slopes.view(kv_heads, group, 1, 1)
    bias = (-slopes * bucket.distance[:, :, None]).masked_fill(~seen[:, :, None], -math.inf)  # [n, kv, group, q, c]
    return bias.flatten(2, 3).to(dtype)


def _attend_by_tiles(query: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, features: Features) -> Tensor:
    """Online softmax over tiles of keys (Milakov and Gimelshein 2018), [n, kv_heads, rows, head_dim].

    What scaled_dot_product_attention does not offer: soft caps and sinks; and a row's result has the same bits whatever
    rows and sequences are beside it, since tiles are cut at fixed positions, a tile that a row does not see changes
    nothing, and products of rows in multiples of 4 and columns of 16 have that property (see cpu/matmul.py).
    """
    rows, context, head_dim = query.shape[2], k.shape[2], query.shape[3]
    query = functional.pad(query, (0, -head_dim % _COLUMNS, 0, -rows % _ROWS))
    k, v = (functional.pad(x, (0, -head_dim % _COLUMNS, 0, -context % _KEY_TILE)) for x in (k, v))
    unseen = False if mask.dtype == torch.bool else -math.inf
    mask = functional.pad(mask.expand(-1, -1, rows, -1), (0, -context % _KEY_TILE, 0, -rows % _ROWS), value=unseen)
    top = query.new_full((*query.shape[:3], 1), -math.inf, dtype=torch.float32)
    divisor = torch.zeros_like(top)
    if features.sinks is not None:  # a logit without a value
        group = features.sinks.view(k.shape[1], -1, 1)
        sinks = group.expand(-1, -1, rows // group.shape[1]).reshape(1, k.shape[1], rows, 1)
        top[:, :, :rows], divisor[:, :, :rows] = sinks, 1.0
    out = torch.zeros(query.shape, dtype=torch.float32)
    for start in range(0, k.shape[2], _KEY_TILE):
        keys = slice(start, start + _KEY_TILE)
        scores = (query @ k[:, :, keys].transpose(-1, -2)).float() * scale
        if features.soft_cap:
            scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
        tile = mask[..., keys]
        scores = scores.masked_fill(~tile, -math.inf) if tile.dtype == torch.bool else scores + tile
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -math.inf, 0.0)  # nothing seen yet
        weights, rescale = torch.exp(scores - shift), torch.exp(top - shift)
        divisor = divisor * rescale + weights.sum(dim=-1, keepdim=True)
        out = out * rescale + (weights.to(v.dtype) @ v[:, :, keys]).float()
        top = new_top
    out = out / divisor.masked_fill(divisor == 0.0, 1.0)  # a row that sees nothing gives zeros
    return out[:, :, :rows, :head_dim].to(query.dtype)


def _group(query_lens: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Which sequences share a call: decodes whose lengths round up to one power of two, as many as _CALL_TOKENS allows;
    each other by itself. Much memory at once is the system's anew at each call, and slow."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len:
            key = (0, seq_len.bit_length()) if query_len == 1 else (1, index)
            groups.setdefault(key, []).append(index)
    calls = []
    for members in groups.values():
        longest = max(seq_lens[member] for member in members)
        count = max(1, _CALL_TOKENS * torch.get_num_threads() // longest)
        calls += [members[start : start + count] for start in range(0, len(members), count)]
    return calls


def _bucket(
    members: list[int],
    starts: list[int],
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[Tensor],
    cache: Tensor,
    token_scale: Tensor | None,
    tree: Tree | None,
) -> Bucket:
    block_size = cache.shape[2]
    q = query_lens[members[0]]
    lens = torch.tensor([seq_lens[m] for m in members])
    context = int(lens.max())
    num_blocks = -(-context // block_size)
    tables = torch.zeros(len(members), num_blocks, dtype=torch.int64)
    for row, member in enumerate(members):
        used = -(-seq_lens[member] // block_size)
        tables[row, :used] = block_tables[member][:used]
    slots = torch.arange(context)
    # A slot past the end reads the sequence's last slot instead: whatever lies unwritten, NaN too, is never read.
    clipped = torch.minimum(slots, lens[:, None] - 1)
    at = tables.gather(1, clipped // block_size).view(-1), (clipped % block_size).view(-1)

    def rows_of(view: Tensor) -> Tensor:
        return row_index(view, *at).view(len(members), context, -1).transpose(1, 2).contiguous()

    scale_rows = None if token_scale is None else rows_of(token_scale[..., None])
    query_rows = torch.tensor([starts[m] for m in members])[:, None] + torch.arange(q)  # [n, q]
    distance = (lens[:, None] - q + torch.arange(q))[:, :, None] - slots  # [n, q, c]
    seen = distance >= 0
    key_positions = slots
    if tree is not None and 1 < q <= MAX_TREE:  # then of one sequence; a single token sees itself in any case
        context_len = context - q
        query_at = tree.positions[query_rows]  # [1, q]
        key_positions = torch.cat((slots[:context_len], query_at[0]))
        distance = query_at[:, :, None] - key_positions
        bits = (tree.ancestors[query_rows][:, :, None] >> torch.arange(q)) & 1  # [1, q, q]
        seen = torch.cat((torch.ones(1, q, context_len, dtype=torch.bool), bits.bool()), dim=2)
    return Bucket(
        query_rows.view(-1), rows_of(cache), seen[:, None], distance[:, None], key_positions, lens - 1, scale_rows
    )
