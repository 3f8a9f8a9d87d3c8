"""paged_attention's kernels against its definition: odd shapes, each feature, and their crossings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nereid_kernels.paged_attention import TreeMask, paged_attention, plan_paged_attention
from tests.kernels.attention_cases import FEATURES, MIXED, Case, Inputs, check
from tests.kernels.covering_array import covering_array


@pytest.mark.parametrize("group", range(1, 17))
def test_any_group_of_heads(group: int) -> None:
    check(Case(((1, 70), (3, 35)), heads=group, kv_heads=1))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim(head_dim: int) -> None:
    check(Case(((1, 70), (20, 35)), head_dim=head_dim))


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_any_block_size(block_size: int) -> None:
    check(Case(((1, 200), (20, 35)), block_size=block_size))


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


@pytest.mark.parametrize("row", covering_array(CROSSED), ids=str)
def test_every_two_properties_together(row: dict[str, Any]) -> None:
    kv_heads = 1 if row["heads"] > 5 else 2
    scales = row["scales"] if row["cache_dtype"] else "tensor"
    check(
        Case(
            ((1, 131), (6, 70), (20, 45)),
            **{**row, "heads": row["heads"] * kv_heads, "scales": scales},
            kv_heads=kv_heads,
        )
    )


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
    """Bitwise: neither on what else is in the call, nor on where the sequence stands in it."""
    case = Case(((1, 1), (4, 131), (0, 0), (16, 300)))
    inputs = Inputs(case)
    together = inputs.run(case, "triton_lang")[5:]
    inputs.query = inputs.query[5:]
    inputs.query_lens, inputs.seq_lens, inputs.tables = [16], [300], inputs.tables[-1:]
    assert torch.equal(inputs.run(case, "triton_lang"), together)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"query": torch.zeros(1, 3, 64)}, "query: got 3 heads; allowed: a multiple of the 2 KV heads"),
        ({"query": torch.zeros(1, 4, 32)}, "k_cache: got shape"),
        ({"query": torch.zeros(1, 4, 64).long()}, "query: got torch.int64"),
        ({"window": -1}, "window, soft_cap: got -1"),
        ({"sinks": torch.zeros(3)}, "sinks: got shape"),
        ({"k_scale": torch.ones(1)}, "k_scale, v_scale: got 1"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], said: str) -> None:
    inputs = Inputs(Case(((1, 5),)))
    plan = plan_paged_attention([1], [5], inputs.tables, inputs.caches[0], backend="triton_lang")
    arguments = {"query": inputs.query, "k_cache": inputs.caches[0], "v_cache": inputs.caches[1]}
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        paged_attention(**{**arguments, "plan": plan, "scale": 1.0, **change})
