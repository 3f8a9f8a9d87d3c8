"""KV write and paged attention on the CPU against a float64 reference; every unused slot is NaN."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nereid_kernels.kv_write import kv_write, plan_kv_write
from nereid_kernels.paged_attention import paged_attention, plan_paged_attention
from tests.conftest import TOLERANCES


def dense_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last len(query) positions; query [q, heads, d], key and value [c, kv_heads, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,chd->hqc", query.double(), key) * scale
    positions = torch.arange(len(key))
    visible = positions <= len(key) - len(query) + torch.arange(len(query))[:, None]
    return torch.einsum("hqc,chd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), value)


class Pool:
    """A pool of NaN with 2 layers, of which the second is used; blocks are handed out in random order."""

    def __init__(self, num_blocks: int, kv_heads: int, block_size: int, head_dim: int) -> None:
        self.tensor = torch.full((num_blocks, 2, 2, kv_heads, block_size, head_dim), math.nan)
        self.k_cache, self.v_cache = self.tensor[:, 1, 0], self.tensor[:, 1, 1]
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        random.Random(1).shuffle(self.free)

    def store(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write a sequence into fresh blocks; its block table."""
        table = torch.tensor([self.free.pop() for _ in range(-(-len(key) // self.block_size))])
        positions = torch.arange(len(key))
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        kv_write(key, value, self.k_cache, self.v_cache, plan_kv_write(slots, self.k_cache))
        return table


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 10), (7, 1, 16), (10, 2, 80)])
def test_any_mix_of_query_lengths_equals_the_dense_reference(
    heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    rng = random.Random(3)
    contexts = [*range(1, 3 * block_size + 2, max(1, block_size // 4)), 100, 129]
    queries = [rng.choice([1, 1, 1, rng.randint(1, context), context]) for context in contexts]
    pool = Pool(sum(-(-c // block_size) for c in contexts) + 3, kv_heads, block_size, head_dim)
    keys, values = ([torch.randn(c, kv_heads, head_dim, generator=generator) for c in contexts] for _ in range(2))
    query = torch.randn(sum(queries), heads, head_dim, generator=generator)
    tables = [pool.store(k, v) for k, v in zip(keys, values, strict=True)]
    plan = plan_paged_attention(queries, contexts, tables, pool.k_cache)
    output = paged_attention(query, pool.k_cache, pool.v_cache, plan, scale=head_dim**-0.5)
    for rows, k, v, q in zip(torch.split(output, queries), keys, values, torch.split(query, queries), strict=True):
        expected = dense_reference(q, k, v, head_dim**-0.5)
        torch.testing.assert_close(rows.double(), expected, rtol=0, atol=TOLERANCES["attention_float32"])


def test_padding_is_written_nowhere() -> None:
    pool = Pool(4, 2, 4, 8)
    before = pool.tensor.clone()
    key = torch.ones(5, 2, 8)
    kv_write(key, key, pool.k_cache, pool.v_cache, plan_kv_write(torch.tensor([-1, 6, -1, 7, -1]), pool.k_cache))
    written = (pool.tensor != before) & pool.tensor.isfinite()
    assert written.sum() == 2 * 2 * 2 * 8
    assert pool.tensor[1, 1, :, :, 2:].eq(1).all() and pool.tensor[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize(
    ("query_len", "seq_len", "num_blocks"), [(0, 5, 2), (6, 5, 2), (1, 9, 2)], ids=["empty", "long", "table"]
)
def test_a_row_that_cannot_be_is_refused(query_len: int, seq_len: int, num_blocks: int) -> None:
    pool = Pool(4, 2, 4, 8)
    with pytest.raises(ValueError, match="no such row"):
        plan_paged_attention([query_len], [seq_len], [torch.arange(1, 1 + num_blocks)], pool.k_cache)


def test_a_pool_of_another_layout_is_refused() -> None:
    pool = torch.zeros(4, 8, 2, 4).transpose(1, 2)  # slots before heads
    with pytest.raises(ValueError, match="block-major"):
        plan_kv_write(torch.tensor([1]), pool)
