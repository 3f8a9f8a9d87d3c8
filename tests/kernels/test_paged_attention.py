"""paged_attention and kv_write on the CPU against their definition; every unused slot is NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nereid_kernels.kv_write import kv_write, plan_kv_write
from nereid_kernels.paged_attention import TreeMask, paged_attention, plan_paged_attention
from tests.kernels.attention_cases import FEATURES, Case, Inputs, check

MANY = tuple((1, n) for n in (1, 2, 6, 7, 8, 15, 16, 17, 33, 100)) + ((5, 129), (7, 7), (0, 3), (64, 200))


@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 10), (7, 1, 16), (10, 2, 80)])
def test_any_mix_of_query_lengths_equals_the_definition(
    heads: int, kv_heads: int, head_dim: int, block_size: int, feature: str
) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(Case(MANY, **shape, **FEATURES[feature]), backend="cpu")


@pytest.mark.parametrize("feature", list(FEATURES))
def test_bfloat16_equals_the_definition(feature: str) -> None:
    check(Case(MANY, dtype=torch.bfloat16, **FEATURES[feature]), backend="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feature", ["plain", "window", "sinks"])
@pytest.mark.parametrize("shape", [(9, 3, 64), (7, 1, 16), (6, 2, 10)], ids=str)
def test_deterministic_bits_depend_on_the_sequence_alone(
    shape: tuple[int, int, int], feature: str, dtype: torch.dtype
) -> None:
    """A sequence of 600 tokens whole, in chunks of any size, and token by token beside other sequences."""
    heads, kv_heads, head_dim = shape
    case = Case(((600, 600), (1, 300), (1, 37)), heads, kv_heads, head_dim, 16, dtype, **FEATURES[feature])
    inputs = Inputs(case)
    whole_query, tables, view = inputs.query[:600], inputs.tables, inputs.caches[0]
    others = torch.randn(2, heads, head_dim).to(dtype)

    def attend(query: torch.Tensor, lens: list[int], ends: list[int], used: list[list[int]]) -> torch.Tensor:
        plan = plan_paged_attention(lens, ends, used, view)
        return paged_attention(query, *inputs.caches, plan, head_dim**-0.5, deterministic=True, **inputs.options)

    whole = attend(whole_query, [600], [600], tables[:1])
    for sizes in ([256, 344], [1, 100, 3, 496], [597, 1, 1, 1]):
        start = 0
        for size in sizes:
            chunk = whole_query[start : start + size]
            alone = attend(chunk, [size], [start + size], tables[:1])
            beside = attend(torch.cat((others, chunk)), [1, 1, size], [300, 37, start + size], [*tables[1:], tables[0]])
            assert torch.equal(alone, whole[start : start + size])
            assert torch.equal(beside[2:], whole[start : start + size])
            start += size


def nan_pool(num_blocks: int, kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    return torch.full((num_blocks, 2, 2, kv_heads, block_size, head_dim), math.nan)


def test_padding_is_written_nowhere() -> None:
    pool = nan_pool(4, 2, 4, 8)
    before, k_cache, v_cache = pool.clone(), pool[:, 1, 0], pool[:, 1, 1]
    key = torch.ones(5, 2, 8)
    kv_write(key, key, k_cache, v_cache, plan_kv_write(torch.tensor([-1, 6, -1, 7, -1]), k_cache))
    written = (pool != before) & pool.isfinite()
    assert written.sum() == 2 * 2 * 2 * 8
    assert pool[1, 1, :, :, 2:].eq(1).all() and pool[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize(("query_len", "seq_len", "num_blocks"), [(6, 5, 2), (1, 9, 2)], ids=["long", "table"])
def test_a_row_that_cannot_be_is_refused(query_len: int, seq_len: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="no such row"):
        plan_paged_attention([query_len], [seq_len], [torch.arange(1, 1 + num_blocks)], nan_pool(4, 2, 4, 8)[:, 1, 0])


def test_a_pool_of_another_layout_is_refused() -> None:
    pool = torch.zeros(4, 8, 2, 4).transpose(1, 2)  # slots before heads
    with pytest.raises(ValueError, match="block-major"):
        plan_kv_write(torch.tensor([1]), pool)


def test_row_that_sees_nothing_gives_zeros() -> None:
    """By SDPA, by tiles (a soft cap), and with ALiBi."""
    for options in ({}, {"soft_cap": 5.0}, {"alibi": True}):
        case = Case(((3, 20),), tree=True, window=4, **options)
        inputs = Inputs(case)
        inputs.tree = TreeMask(torch.tensor([0, 2, 4]), torch.tensor([1000, 1000, 17], dtype=torch.int32))
        result = inputs.run(case, "cpu")
        assert result[0].eq(0).all() and result[1:].ne(0).all(), options
