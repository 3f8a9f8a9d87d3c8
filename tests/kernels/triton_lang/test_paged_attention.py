"""paged_attention's kernels against its definition: odd shapes, each feature, and their crossings."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from nereid_kernels.paged_attention import TreeMask, paged_attention, plan_paged_attention
from nereid_kernels.reference import paged_attention as reference
from tests.kernels.attention_cases import EVERY_LENGTH, FEATURES, MIXED, Case, Inputs, check
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.covering_array import covering_array
from tests.kernels.triton_lang.devices import Reserve


@pytest.mark.parametrize("group", range(1, 17))
def test_any_group_of_heads(group: int) -> None:
    check(Case(((1, 70), (3, 35)), heads=group, kv_heads=1))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim(head_dim: int) -> None:
    check(Case(((1, 70), (20, 35)), head_dim=head_dim))


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_any_block_size(block_size: int) -> None:
    check(Case(((1, 200), (20, 35)), block_size=block_size))


def test_every_length_around_the_edges_of_blocks() -> None:
    check(Case(EVERY_LENGTH, heads=1, kv_heads=1))


@pytest.mark.parametrize("feature", list(FEATURES))
def test_each_feature_over_a_mix_of_query_lengths(feature: str) -> None:
    check(Case(MIXED, **FEATURES[feature]))


CROSSED: dict[str, tuple[Any, ...]] = {
    "head_dim": (64, 80, 96, 112, 128, 192, 256),
    "heads": (1, 3, 5, 6, 7, 16),
    "block_size": (16, 32, 48, 128),
    "cache_dtype": (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "scales": ("tensor", "head", "token"),
    "window": (0, 37),
    "soft_cap": (0.0, 5.0),
    "sinks": (False, True),
    "alibi": (False, True),
    "tree": (False, True),
}


CROSSED_WITH_SINK_TOKENS = {
    **CROSSED,
    "head_dim": (64, 80),
    "heads": (1, 3, 16),
    "block_size": (16, 48),
    "window": (37,),
    "num_sink_tokens": (5, 40),
}


@pytest.mark.parametrize("row", [*covering_array(CROSSED), *covering_array(CROSSED_WITH_SINK_TOKENS)], ids=str)
def test_every_two_properties_together(row: dict[str, Any]) -> None:
    kv_heads = 1 if row["heads"] > 5 else 2
    row = {**row, "heads": row["heads"] * kv_heads, "kv_heads": kv_heads}
    row["scales"] = row["scales"] if row["cache_dtype"] else "tensor"
    check(Case(((1, 131), (6, 70), (20, 45)), **row))


def test_row_that_sees_nothing_gives_zeros() -> None:
    """A window and a tree whose positions lie beyond everything."""
    case = Case(((3, 20),), tree=True, window=4)
    inputs = Inputs(case)
    inputs.tree = TreeMask(torch.tensor([0, 2, 4]), torch.tensor([1000, 1000, 17], dtype=torch.int32))
    result = inputs.run(case, "triton_lang")
    assert result[0].eq(0).all() and result[1:].ne(0).all()


def test_no_sequence_and_no_token() -> None:
    assert Inputs(Case(())).run(Case(()), "triton_lang").shape == (0, 4, 64)
    assert Inputs(Case(((0, 5),))).run(Case(((0, 5),)), "triton_lang").shape == (0, 4, 64)


def test_result_does_not_depend_on_the_batch() -> None:
    """Bitwise: neither on what else is in the call, prefill among it, nor on where the sequence stands in it."""
    case = Case(((1, 1), (40, 60), (0, 0), (16, 300), (1, 131)))
    inputs = Inputs(case)
    together = inputs.run(case, "triton_lang")
    for at, rows in ((3, slice(41, 57)), (1, slice(1, 41))):
        alone = Inputs(case)
        alone.query = inputs.query[rows]
        alone.query_lens, alone.seq_lens, alone.tables = (
            [inputs.query_lens[at]],
            [inputs.seq_lens[at]],
            [inputs.tables[at]],
        )
        alone.caches = inputs.caches
        assert torch.equal(alone.run(case, "triton_lang"), together[rows])


# Inputs that broke comparable systems.


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17])
def test_window_is_exact_to_the_key(window: int) -> None:
    """At lengths about the window, for prefill, chunk, verification and decode."""
    lengths = range(max(1, window - 1), window + 3)
    check(Case(tuple((min(q, n), n) for n in lengths for q in (n, 5, 3, 1)), heads=2, kv_heads=1, window=window))


@pytest.mark.parametrize("num_sink_tokens", [1, 17, 32, 100])
@pytest.mark.parametrize("window", [1, 40])
def test_sink_tokens_are_exact_to_the_key(window: int, num_sink_tokens: int) -> None:
    """At lengths about the edges of sinks, of tiles and of splits, for prefill, chunk, verification and decode.

    Whatever lies between sinks and windows is NaN."""
    reach = num_sink_tokens + window
    lengths = (num_sink_tokens, reach, reach + 1, reach + 33, 300)
    sequences = tuple((min(q, n), n) for n in lengths for q in (n, 17, 3, 1))
    check(Case(sequences, heads=2, kv_heads=1, window=window, num_sink_tokens=num_sink_tokens))


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_sink_tokens_of_a_long_context(block_size: int) -> None:
    """Several splits, of which the first holds the sinks."""
    for query_len in (1, 16, 20):
        case = Case(((query_len, 4097), (query_len, 33)), heads=2, kv_heads=1, block_size=block_size)
        check(replace(case, window=1000, num_sink_tokens=70))


def test_window_that_is_longer_than_the_context() -> None:
    check(Case(((1, 300), (20, 300), (300, 300)), heads=2, kv_heads=1, window=4096))


def test_scores_of_a_hundred_thousand() -> None:
    """No finite number stands for "not seen"."""
    check(Case(((1, 50), (3, 40), (20, 33)), sizes=(3e4, 1.0, 1.0)))


@pytest.mark.parametrize("window", [0, 37])
def test_soft_cap_of_large_scores(window: int) -> None:
    """Scores of hundreds, capped before they are masked."""
    check(Case(((1, 70), (20, 45)), soft_cap=50.0, window=window, sizes=(150.0, 1.0, 1.0)))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
def test_scales_of_small_keys_and_large_values(cache_dtype: torch.dtype, scales: str) -> None:
    check(Case(((1, 70), (20, 45)), cache_dtype=cache_dtype, scales=scales, sizes=(100.0, 0.01, 30.0)))


@pytest.mark.parametrize("query_len", [1, 4, 20])
def test_a_short_context_beside_a_long_one_under_a_window(query_len: int) -> None:
    """Each is split by its own length."""
    check(Case(((query_len, 4097), (query_len, 33)), heads=2, kv_heads=1, window=1000))


def test_a_block_past_two_to_the_31_elements(reserve: Reserve) -> None:
    """Keys and values in the last block of a pool of more than 2**31 elements."""
    kv_heads, block_size, head_dim = 2, 16, 256
    shape = (1 << 10, 2 << 7, 2, kv_heads, block_size, head_dim)  # [block, layer, k/v, kv_head, slot, head_dim]
    pool = reserve(math.prod(shape), torch.float8_e5m2).view(shape)
    caches = pool[:, -1, 0], pool[:, -1, 1]
    last = shape[0] - 1
    assert last * caches[0].stride(0) > 1 << 31
    rows = torch.randn(2, kv_heads, 5, head_dim).to(torch.float8_e5m2)
    for cache, new in zip(caches, rows.view(torch.uint8), strict=True):
        cache.view(torch.uint8)[last, :, :5] = new
    query, one = torch.randn(2, 4, head_dim), torch.ones(1)
    plan = plan_paged_attention([2], [5], [[last]], caches[0], backend="triton_lang")
    result = paged_attention(query, *caches, plan, 1.0, k_scale=one, v_scale=one)
    k_cache, v_cache = rows[:, None]  # the block alone
    exact, plain = (
        reference.paged_attention(
            query.to(d), k_cache, v_cache, [torch.tensor([0])], [2], [5], 1.0, k_scale=one, v_scale=one
        )
        for d in (torch.float64, torch.float32)
    )
    assert_as_good_as_plain(result, exact, plain)


def test_a_tree_beside_a_chunk_that_is_none() -> None:
    check(Case(((70, 100), (6, 40), (1, 9)), tree=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"query": torch.zeros(1, 3, 64)}, "query: got 3 heads; allowed: a multiple of the 2 KV heads"),
        ({"query": torch.zeros(1, 4, 32)}, "k_cache: got shape"),
        ({"query": torch.zeros(1, 4, 64).long()}, "query: got torch.int64"),
        ({"window": -1}, "window: got -1"),
        ({"soft_cap": -1.0}, "soft_cap: got -1.0"),
        ({"num_sink_tokens": 4}, "num_sink_tokens: got 4; allowed: 0, without a window"),
        ({"window": 8, "num_sink_tokens": -1}, "num_sink_tokens: got -1; allowed: 0 (off) or more"),
        ({"sinks": torch.zeros(3)}, "sinks: got shape"),
        ({"k_scale": torch.ones(1)}, "k_scale, v_scale: got 1"),
        ({"sinks": torch.zeros(8)[::2]}, "sinks: got strides (2,)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], said: str) -> None:
    inputs = Inputs(Case(((1, 5),)))
    plan = plan_paged_attention([1], [5], inputs.tables, inputs.caches[0], backend="triton_lang")
    arguments = {"query": inputs.query, "k_cache": inputs.caches[0], "v_cache": inputs.caches[1]}
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        paged_attention(**{**arguments, "plan": plan, "scale": 1.0, **change})


@pytest.mark.parametrize(("cache_dtype", "wanted"), [(torch.int8, "int32"), (torch.float8_e4m3fn, "float32")])
def test_token_scales_of_another_dtype_are_refused(cache_dtype: torch.dtype, wanted: str) -> None:
    inputs = Inputs(Case(((1, 5),), cache_dtype=cache_dtype, scales="token"))
    other = {"int32": torch.float32, "float32": torch.int32}[wanted]
    k_scale, v_scale = (None if scale is None else scale.view(other) for scale in inputs.scales)
    plan = inputs.plan([1], [5], inputs.tables, backend="triton_lang")
    with pytest.raises(TypeError, match=f"k_scale: got {other}; allowed: torch.{wanted}"):
        paged_attention(inputs.query, *inputs.caches, plan, 1.0, k_scale=k_scale, v_scale=v_scale)


def test_scales_of_two_forms_are_refused() -> None:
    inputs = Inputs(Case(((1, 5),), cache_dtype=torch.int8))
    plan = plan_paged_attention([1], [5], inputs.tables, inputs.caches[0], backend="triton_lang")
    with pytest.raises(ValueError, match=r"v_scale: got shape .* as k_scale"):
        paged_attention(inputs.query, *inputs.caches, plan, 1.0, k_scale=torch.ones(1), v_scale=torch.ones(2))


@pytest.mark.parametrize(
    ("ancestors", "positions", "said"),
    [
        (torch.ones(3).long(), torch.ones(2).int(), "ancestors: got shape [3]"),
        (torch.ones(2).int(), torch.ones(2).int(), "ancestors: got torch.int32"),
        (torch.ones(2).long(), torch.ones(2).long(), "positions: got torch.int64"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(ancestors: torch.Tensor, positions: torch.Tensor, said: str) -> None:
    inputs = Inputs(Case(((2, 5),)))
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        plan_paged_attention(
            [2], [5], inputs.tables, inputs.caches[0], tree=TreeMask(ancestors, positions), backend="triton_lang"
        )
