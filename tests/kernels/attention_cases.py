"""Calls of paged_attention as data, their tensors, and the comparison with the definition; for every backend.

Blocks are handed out in random order, a table has one more than its tokens need, and every slot that is not in use
holds NaN.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_kernels.formats import pack_scales
from nereid_kernels.paged_attention import AttentionPlan, TreeMask, paged_attention, plan_paged_attention
from nereid_kernels.reference import paged_attention as reference
from nereid_kernels.reference.kv_write import quantise
from nereid_kernels.splitting import MAX_TREE
from tests.kernels.bounds import assert_as_good_as_plain


@dataclass(frozen=True, slots=True)
class Case:
    """One call. sequences: (query length, sequence length) each.  sizes: of queries, keys and values; 1 is normal."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    scales: str = "tensor"
    window: int = 0
    num_sink_tokens: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    sizes: tuple[float, float, float] = (1.0, 1.0, 1.0)


TWO_NANS = 0x7FC07FC0  # a scale and an offset
MIXED = ((1, 1), (4, 131), (40, 60), (0, 0), (16, 300))
EVERY_LENGTH = tuple((query_len, n) for n in range(1, 4 * 16 + 1) for query_len in {1, n})  # around blocks of 16


def make_scale(case: Case, num_blocks: int, size: float) -> Tensor:
    """One for each token is strided over blocks, and has an offset with int8."""
    shapes = {"tensor": (1,), "head": (case.kv_heads,), "token": (num_blocks, 3, case.kv_heads, case.block_size)}
    base = 0.03 if case.cache_dtype == torch.int8 else 0.1
    scale = size * base * (0.5 + torch.rand(shapes[case.scales]))
    if case.scales == "token" and case.cache_dtype == torch.int8:
        scale = pack_scales(scale.bfloat16().float(), (size * torch.randn(scale.shape)).bfloat16().float())
    return scale[:, 1] if case.scales == "token" else scale


def random_tree(query_len: int, context_len: int) -> tuple[list[int], list[int]]:
    """Ancestors and positions of a tree whose tokens come after their parents; a chunk's where it is too large."""
    if query_len > MAX_TREE:
        return [0] * query_len, list(range(context_len, context_len + query_len))
    ancestors, positions = [1], [context_len]
    for token in range(1, query_len):
        parent = random.randrange(token)
        ancestors.append(ancestors[parent] | 1 << token)
        positions.append(positions[parent] + 1)
    return ancestors[:query_len], positions[:query_len]


class Inputs:
    """Tensors of a case. Blocks are handed out in random order; every slot that is not in use, or that lies between the
    first num_sink_tokens and every window, holds NaN, and a block that lies there as a whole is the null block."""

    def __init__(self, case: Case) -> None:
        random.seed(1)
        self.query_lens, self.seq_lens = ([s[i] for s in case.sequences] for i in (0, 1))
        needed = [-(-n // case.block_size) for n in self.seq_lens]
        num_blocks = sum(needed) + 3
        free = random.sample(range(1, num_blocks), num_blocks - 1)
        ahead = free.pop()
        self.tables = [[*(free.pop() for _ in range(n)), ahead] for n in needed]
        query_size, *kv_sizes = case.sizes
        self.query = (query_size * torch.randn(sum(self.query_lens), case.heads, case.head_dim)).to(case.dtype)
        cache_dtype = case.cache_dtype or case.dtype
        self.scales = [make_scale(case, num_blocks, size) if case.cache_dtype else None for size in kv_sizes]
        # Layer 1 of 2, so that the block stride is not the product of the inner sizes.
        shape = (num_blocks, 2, 2, case.kv_heads, case.block_size, case.head_dim)
        pool = torch.full(shape, 100 if cache_dtype == torch.int8 else math.nan, dtype=torch.float32).to(cache_dtype)
        self.caches = (pool[:, 1, 0], pool[:, 1, 1])
        used = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
        for table, (query_len, seq_len) in zip(self.tables, case.sequences, strict=True):
            lowest = max(0, seq_len - query_len - case.window + 1) if case.window else 0
            self._fill(case, table, lowest, seq_len, kv_sizes, used)
            left = range(-(-case.num_sink_tokens // case.block_size), lowest // case.block_size)
            table[left.start : left.stop] = [0] * len(left)
        if case.scales == "token":
            for scale in self.scales:
                if scale is not None:
                    scale.masked_fill_(~used[:, None], math.nan if scale.is_floating_point() else TWO_NANS)
        self.options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap}
        self.options["num_sink_tokens"] = case.num_sink_tokens
        self.options["sinks"] = torch.randn(case.heads) if case.sinks else None
        self.options["alibi_slopes"] = torch.rand(case.heads) * 0.1 if case.alibi else None
        self.tree = self._tree() if case.tree else None

    def _fill(self, case: Case, table: list[int], lowest: int, seq_len: int, sizes: list[float], used: Tensor) -> None:
        """Keys and values of the positions from `lowest` on, and of the first ones."""
        positions = torch.cat((torch.arange(min(case.num_sink_tokens, lowest)), torch.arange(lowest, seq_len)))
        blocks = torch.tensor(table, dtype=torch.int64)[positions // case.block_size]
        slots = positions % case.block_size
        used[blocks, slots] = True
        for cache, scale, size in zip(self.caches, self.scales, sizes, strict=True):
            rows = size * torch.randn(len(positions), case.kv_heads, case.head_dim)
            if scale is not None:
                by_head = scale[blocks, :, slots] if scale.dim() == 3 else scale.expand(case.kv_heads)
                rows = quantise(rows, by_head[..., None], cache.dtype)
            bits = torch.uint8 if cache.element_size() == 1 else cache.dtype  # PyTorch cannot scatter float8
            cache.view(bits)[blocks, :, slots] = rows.to(cache.dtype).view(bits)

    def _tree(self) -> TreeMask:
        ancestors, positions = [], []
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            a, p = random_tree(query_len, seq_len - query_len)
            ancestors += [bits - (1 << 64) if bits >> 63 else bits for bits in a]  # as signed numbers
            positions += p
        return TreeMask(torch.tensor(ancestors), torch.tensor(positions, dtype=torch.int32))

    def run(self, case: Case, backend: str) -> Tensor:
        k_scale, v_scale = self.scales
        plan = self.plan(self.query_lens, self.seq_lens, self.tables, tree=self.tree, backend=backend)
        return paged_attention(
            self.query, *self.caches, plan, case.head_dim**-0.5, k_scale=k_scale, v_scale=v_scale, **self.options
        )

    def plan(
        self, query_lens: list[int], seq_lens: list[int], tables: list[list[int]], **options: Any
    ) -> AttentionPlan:
        """Of a call over these caches."""
        token_scale = next((scale for scale in self.scales if scale is not None and scale.dim() == 3), None)
        return plan_paged_attention(query_lens, seq_lens, tables, self.caches[0], token_scale=token_scale, **options)

    def expected(self, case: Case, dtype: torch.dtype) -> Tensor:
        k_cache, v_cache = (c if case.cache_dtype else c.to(dtype) for c in self.caches)
        tree: dict[str, Any] = {}
        if self.tree is not None:
            tree = {"ancestors": self.tree.ancestors, "positions": self.tree.positions}
        return reference.paged_attention(
            self.query.to(dtype),
            k_cache,
            v_cache,
            [torch.tensor(table) for table in self.tables],
            self.query_lens,
            self.seq_lens,
            case.head_dim**-0.5,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
            **self.options,
            **tree,
        )


def check(case: Case, backend: str = "triton_lang") -> None:
    inputs = Inputs(case)
    result = inputs.run(case, backend)
    exact, plain = inputs.expected(case, torch.float64), inputs.expected(case, case.dtype)
    assert_as_good_as_plain(result, exact, plain, inputs.query_lens)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "sink_tokens": {"window": 37, "num_sink_tokens": 5},
    "soft_cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "tree": {"tree": True},
    "all": {"window": 37, "num_sink_tokens": 5, "soft_cap": 5.0, "sinks": True, "alibi": True, "tree": True},
}
