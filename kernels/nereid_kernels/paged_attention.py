"""paged_attention: a step's queries over each sequence's blocks, for any mix of query lengths in one call.

Prefill, chunk, decode and verification differ by query length alone: query token i of a sequence stands at position
seq_len - query_len + i and sees the keys up to its own. Exact softmax, nothing of the size of a score matrix is kept:
FlashAttention-2 (Dao 2023, arXiv 2307.08691) with flash-decoding's split of long contexts (Dao et al. 2023) for queries
of up to 16 tokens; paging as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import paged_attention as cpu
from nereid_kernels.cpu.stored import Stored
from nereid_kernels.formats import QUANTISED, scale_dtype
from nereid_kernels.launch import run
from nereid_kernels.splitting import SPLIT_QUERY


@dataclass(frozen=True, slots=True)
class TreeMask:
    """What the query tokens of a speculative tree see of each other (SpecInfer, Miao et al. 2023, arXiv 2305.09781).

    ancestors: [tokens] int64; bit j says that the token sees query token j of its sequence, itself included. Not looked
        at in a sequence of more than MAX_TREE query tokens, which is no tree but a chunk.
    positions: [tokens] int32; the position of each: the length of its context plus its depth in the tree.
    """

    ancestors: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a step's queries and their contexts lie, worked out once for all layers by `plan_paged_attention`.

    block_tables: [seqs, max blocks] int32.  cu_query_lens: [seqs + 1] int32, running sums of the query lengths.
    seq_lens: [seqs] int32, with the new tokens.
    max_short_query, max_long_query: at least the longest query of up to SPLIT_QUERY tokens, and of more; 0: none.
    buckets: what the CPU's implementation has worked out, None where the kernels are used.
    """

    block_tables: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    max_short_query: int
    max_long_query: int
    tree: TreeMask | None
    buckets: tuple[cpu.Bucket, ...] | None


def plan_paged_attention(
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: Sequence[Sequence[int] | Tensor] | Tensor,
    cache: Tensor,
    *,
    token_scale: Tensor | None = None,
    tree: TreeMask | None = None,
    backend: str = "auto",
) -> AttentionPlan:
    """Prepare `paged_attention` for one step.

    query_lens, seq_lens: by sequence, the new tokens and the tokens in all (new ones included).
    block_tables: by sequence, at least ceil(seq_len / block size) block ids; what follows them is not looked at. As one
        tensor: [seqs, max blocks] int32, which is kept.
    cache: a layer's K or V, [block, kv_head, slot, head_dim]; all layers must have its strides.
    token_scale: a layer's k_scale or v_scale, [block, kv_head, slot], where `paged_attention` will be given such; all
        layers must have its strides.
    Raises ValueError where a query is longer than its sequence, or a table too short, and for a tree that does not fit.
    """
    block_size, device = cache.shape[2], cache.device
    for query_len, seq_len, width in zip(query_lens, seq_lens, _widths(block_tables), strict=True):
        if not 0 <= query_len <= seq_len or width * block_size < seq_len:
            raise ValueError(f"query {query_len}, sequence {seq_len}, {width} blocks of {block_size}: no such row")
    if tree is not None:
        sizes = {"tokens": sum(query_lens)}
        check_shapes(sizes, ancestors=(tree.ancestors, ("tokens",)), positions=(tree.positions, ("tokens",)))
        check_dtypes((torch.int64,), ancestors=tree.ancestors)
        check_dtypes((torch.int32,), positions=tree.positions)
        check_contiguous_rows(ancestors=tree.ancestors, positions=tree.positions)
        check_same_device(cache=cache, ancestors=tree.ancestors, positions=tree.positions)
    padded = block_tables if isinstance(block_tables, Tensor) else _pad(block_tables, seq_lens, block_size)
    buckets = None
    if pick(device, backend) == "cpu":
        cpu_tree = None if tree is None else cpu.Tree(tree.ancestors, tree.positions.long())
        buckets = cpu.plan_buckets(query_lens, seq_lens, list(padded), cache, token_scale, cpu_tree)
    return AttentionPlan(
        padded.to(device),
        _int32([0, *itertools.accumulate(query_lens)]).to(device),
        _int32(seq_lens).to(device),
        max((n for n in query_lens if n <= SPLIT_QUERY), default=0),
        max((n for n in query_lens if n > SPLIT_QUERY), default=0),
        tree,
        buckets,
    )


def _widths(block_tables: Sequence[Sequence[int] | Tensor] | Tensor) -> list[int]:
    """Of each sequence's table."""
    if isinstance(block_tables, Tensor):
        num_sequences, width = block_tables.shape
        return [width] * num_sequences
    return [len(table) for table in block_tables]


def _int32(numbers: list[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int32))  # a third of the time of torch.tensor


def _pad(block_tables: Sequence[Sequence[int] | Tensor], seq_lens: list[int], block_size: int) -> Tensor:
    """[seqs, max blocks] int32"""
    used = [-(-seq_len // block_size) for seq_len in seq_lens]
    padded = torch.zeros(len(used), max(used, default=1) or 1, dtype=torch.int32)
    for row, table, count in zip(padded, block_tables, used, strict=True):
        row[:count] = torch.as_tensor(table)[:count]
    return padded


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int = 0,
    num_sink_tokens: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention output, [tokens, heads, head_dim] of query's dtype. A query token that sees nothing gets zeros; tokens
    past the last sequence's (padding) are left unwritten.

    query: [tokens, heads, head_dim] float16, bfloat16 or float32.
    k_cache, v_cache: a layer's views, [block, kv_head, slot, head_dim], with the step's own tokens written already; of
        query's dtype, or float8 e4m3 or e5m2, or int8. heads is a multiple of the KV heads.
    scale: what query x key products are multiplied by before the softmax.
    window: a query sees the `window` latest keys, itself included; 0 is all (Longformer, Beltagy et al. 2020).
    num_sink_tokens: with a window, a query sees the first `num_sink_tokens` positions besides (StreamingLLM's attention
        sinks, Xiao et al. 2023, arXiv 2309.17453). What lies between them and every window is not read.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 is off (Gemma 2, arXiv 2408.00118).
    sinks: [heads] float32, a logit a head that takes part in the softmax and has no value (GPT-OSS).
    alibi_slopes: [heads] float32, slope x distance is taken off a score (ALiBi, Press et al. 2021, arXiv 2108.12409).
    k_scale, v_scale: what a quantised cache's elements are multiplied by, float32: [1], [kv_heads], or for each token
        [block, kv_head, slot], of int8 with an offset, as int32; as `kv_write` writes them.
    deterministic: a row's bits depend on its own sequence alone, not on the batch nor on chunking; on the CPU only.
    Raises ValueError or TypeError, which name the argument.
    """
    check_same_device(query=query, plan=plan.seq_lens)
    _check_window(window, num_sink_tokens)
    _check(query, k_cache, v_cache, soft_cap, sinks, alibi_slopes, k_scale, v_scale)
    if plan.buckets is not None:
        features = cpu.Features(window, num_sink_tokens, soft_cap, sinks, alibi_slopes, deterministic)
        if k_scale is not None and k_scale.dim() == 3 and any(bucket.scale_rows is None for bucket in plan.buckets):
            raise ValueError("k_scale: got one for each token; allowed: others, as the plan has no token_scale")
        keys, values = Stored(k_cache, k_scale), Stored(v_cache, v_scale)
        return cpu.paged_attention(query, keys, values, plan.buckets, scale, features)
    if deterministic:
        raise ValueError("deterministic: got True with the Triton-lang kernels; allowed there: False")
    ancestors, positions = (plan.tree.ancestors, plan.tree.positions) if plan.tree else (None, None)
    attended: Tensor = _paged_attention(
        query, k_cache, v_cache, plan.block_tables, plan.cu_query_lens, plan.seq_lens, k_scale, v_scale, sinks,
        alibi_slopes, ancestors, positions, plan.max_short_query, plan.max_long_query, scale, window,
        num_sink_tokens, soft_cap,
    )  # fmt: skip
    return attended


def _check_window(window: int, num_sink_tokens: int) -> None:
    if window < 0:
        raise ValueError(f"window: got {window}; allowed: 0 (off) or more")
    if num_sink_tokens < 0 or (num_sink_tokens and not window):
        allowed = "0 (off) or more" if window else "0, without a window"
        raise ValueError(f"num_sink_tokens: got {num_sink_tokens}; allowed: {allowed}")


def _check(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    soft_cap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_dtypes(FLOATS, query=query)
    check_dtypes((query.dtype, *QUANTISED), k_cache=k_cache)
    check_dtypes((k_cache.dtype,), v_cache=v_cache)
    sizes: dict[str, int] = {}
    check_shapes(
        sizes,
        query=(query, ("tokens", "heads", "head_dim")),
        k_cache=(k_cache, ("blocks", "kv_heads", "block_size", "head_dim")),
        v_cache=(v_cache, ("blocks", "kv_heads", "block_size", "head_dim")),
    )
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"query: got {sizes['heads']} heads; allowed: a multiple of the {sizes['kv_heads']} KV heads")
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"v_cache: got strides {v_cache.stride()}; allowed: {k_cache.stride()}, as k_cache")
    if soft_cap < 0:
        raise ValueError(f"soft_cap: got {soft_cap}; allowed: 0 (off) or more")
    by_head = {name: x for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)) if x is not None}
    check_shapes(sizes, **{name: (x, ("heads",)) for name, x in by_head.items()})
    scales = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    if len(scales) != (2 if k_cache.dtype in QUANTISED else 0):
        raise ValueError(f"k_scale, v_scale: got {len(scales)}; allowed: both with a quantised cache, else none")
    for name, x in scales.items():
        if tuple(x.shape) not in ((1,), (sizes["kv_heads"],), tuple(k_cache.shape[:3])):
            raise ValueError(f"{name}: got shape {list(x.shape)}; allowed: [1], [kv_heads], [block, kv_head, slot]")
    layouts = {name: f"shape {list(x.shape)}, strides {x.stride()}" for name, x in scales.items()}
    if scales and layouts["v_scale"] != layouts["k_scale"]:
        raise ValueError(f"v_scale: got {layouts['v_scale']}; allowed: {layouts['k_scale']}, as k_scale")
    check_dtypes((torch.float32,), **by_head)
    for name, x in scales.items():
        check_dtypes((scale_dtype(k_cache.dtype, by_token=x.dim() == 3),), **{name: x})
    check_same_device(query=query, k_cache=k_cache, v_cache=v_cache, **by_head, **scales)
    check_contiguous_rows(query=query, k_cache=k_cache, v_cache=v_cache, **by_head, **scales)


@torch.library.custom_op("nereid_kernels::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, cu_query_lens: Tensor, seq_lens: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    ancestors: Tensor | None, positions: Tensor | None, max_short_query: int, max_long_query: int, scale: float,
    window: int, num_sink_tokens: int, soft_cap: float,
) -> Tensor:  # fmt: skip
    from nereid_kernels.triton_lang.paged_attention import Operands, launch_paged_attention

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    operands = Operands(
        query, k_cache, v_cache, out, block_tables, cu_query_lens, seq_lens, k_scale, v_scale, sinks,
        alibi_slopes, ancestors, positions,
    )  # fmt: skip
    longest = (max_short_query, max_long_query)
    for launch in launch_paged_attention(operands, *longest, scale, window, num_sink_tokens, soft_cap):
        run(launch)
    return out


@_paged_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
