"""paged_attention and kv_write on the CPU against their definition; every unused slot is NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nereid_kernels.formats import pack_scales
from nereid_kernels.kv_write import kv_write, plan_kv_write
from nereid_kernels.paged_attention import TreeMask, paged_attention, plan_paged_attention
from tests.kernels.attention_cases import EVERY_LENGTH, FEATURES, Case, Inputs, check
from tests.kernels.covering_array import covering_array

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


def test_every_length_around_the_edges_of_blocks() -> None:
    check(Case(EVERY_LENGTH, 4, 2, 10), backend="cpu")


def test_decodes_of_long_contexts_are_gathered_a_few_at_a_time() -> None:
    """However many there are; each is still in just one call, and equals the definition."""
    threads = torch.get_num_threads()
    lens = [1000 + index for index in range(3 * threads)]
    case = Case(tuple((1, length) for length in lens), 4, 2, 10, 16)
    check(case, backend="cpu")
    plan = plan_paged_attention([1] * len(lens), lens, Inputs(case).tables, Inputs(case).caches[0])
    assert plan.buckets is not None
    calls = [bucket.context_rows.shape for bucket in plan.buckets]  # [n, kv_heads, c]
    assert sum(n for n, _, _ in calls) == len(lens)
    assert all(n == 1 or n * c <= 2048 * threads for n, _, c in calls)
    assert len(calls) > 1


QUANTISED = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


CROSSED: dict[str, tuple[Any, ...]] = {
    "feature": tuple(FEATURES),
    "cache": tuple(QUANTISED),
    "scales": ("tensor", "head", "token"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize("row", covering_array(CROSSED), ids=str)
def test_a_quantised_cache_equals_the_definition(row: dict[str, Any]) -> None:
    quantised: dict[str, Any] = {"cache_dtype": QUANTISED[row["cache"]], "scales": row["scales"]}
    check(Case(MANY, dtype=row["dtype"], **quantised, **FEATURES[row["feature"]]), backend="cpu")


@pytest.mark.parametrize("block_size", [1, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 10), (7, 1, 16), (10, 2, 80)])
def test_a_quantised_cache_of_any_shape(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    quantised: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "scales": "token"}
    check(Case(MANY, heads, kv_heads, head_dim, block_size, **quantised, **FEATURES["all"]), backend="cpu")


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("cache", list(QUANTISED))
def test_scales_of_small_keys_and_large_values(cache: str, scales: str) -> None:
    case = Case(MANY, cache_dtype=QUANTISED[cache], scales=scales, sizes=(100.0, 0.01, 30.0))
    check(case, backend="cpu")


@pytest.mark.parametrize("cache", list(QUANTISED))
def test_every_code_is_read_as_the_number_that_it_stands_for(cache: str) -> None:
    """A key's or value's only number, through a softmax over a single key; a NaN reads as one."""
    codes = torch.arange(256, dtype=torch.uint8).view(QUANTISED[cache])
    scale, offset = torch.full((256, 1, 1), 0.75), 0.0
    if cache == "int8":
        offset = -20.5
        scale = pack_scales(scale, torch.full_like(scale, offset))
    k_cache, v_cache = torch.zeros(256, 1, 1, 1, dtype=codes.dtype), codes.view(256, 1, 1, 1)
    plan = plan_paged_attention([1] * 256, [1] * 256, [[i] for i in range(256)], v_cache, token_scale=scale)
    read = paged_attention(torch.ones(256, 1, 1), k_cache, v_cache, plan, 1.0, k_scale=scale, v_scale=scale)
    wanted = 0.75 * codes.float() + offset
    assert torch.equal(read.view(256).nan_to_num(1e9, 1e8, -1e8), wanted.nan_to_num(1e9, 1e8, -1e8))


def test_scales_that_the_plan_does_not_know_are_refused() -> None:
    inputs = Inputs(Case(((1, 5),), cache_dtype=torch.int8, scales="token"))
    plan = plan_paged_attention([1], [5], inputs.tables, inputs.caches[0])
    k_scale, v_scale = inputs.scales
    with pytest.raises(ValueError, match="k_scale: got one for each token; allowed: others"):
        paged_attention(inputs.query, *inputs.caches, plan, 1.0, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feature", ["plain", "window", "sink_tokens", "sinks"])
@pytest.mark.parametrize(
    ("shape", "cache"),
    [*(((9, 3, 64), c) for c in ("plain", "int8", "e4m3")), ((7, 1, 16), "plain"), ((6, 2, 10), "plain")],
    ids=str,
)
def test_deterministic_bits_depend_on_the_sequence_alone(
    shape: tuple[int, int, int], feature: str, cache: str, dtype: torch.dtype
) -> None:
    """A sequence of 600 tokens whole, in chunks of any size, and token by token beside other sequences."""
    heads, kv_heads, head_dim = shape
    quantised: dict[str, Any] = {"cache_dtype": QUANTISED.get(cache), "scales": "token"}
    lengths = ((600, 600), (1, 300), (1, 37))
    case = Case(lengths, heads, kv_heads, head_dim, 16, dtype, **quantised, **FEATURES[feature])
    inputs = Inputs(case)
    whole_query, tables = inputs.query[:600], inputs.tables
    others = torch.randn(2, heads, head_dim).to(dtype)
    options = {**inputs.options, "k_scale": inputs.scales[0], "v_scale": inputs.scales[1]}

    def attend(query: torch.Tensor, lens: list[int], ends: list[int], used: list[list[int]]) -> torch.Tensor:
        plan = inputs.plan(lens, ends, used)
        return paged_attention(query, *inputs.caches, plan, head_dim**-0.5, deterministic=True, **options)

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
