"""Attention over a paged cache against its definition; bits that depend on the sequence alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nereid_kernels.native.library import Library
from nereid_kernels.native.program import LayerKV, Program, Rows
from tests.kernels.attention_cases import EVERY_LENGTH, FEATURES, Case, Inputs
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.native.programs import DTYPES, arrays, filled

MANY = tuple((1, n) for n in (1, 2, 6, 7, 8, 15, 16, 17, 33, 100)) + ((5, 129), (7, 7), (0, 3), (64, 200))
LONG = ((1, 511), (1, 512), (1, 513), (16, 1600), (17, 1601), (3, 2000), (700, 700))  # around a chunk of the keys
WITHOUT_TREES = {name: options for name, options in FEATURES.items() if "tree" not in options}
WITHOUT_TREES["all but trees"] = {**FEATURES["all"], "tree": False}
SHAPES = [(9, 3, 64), (4, 4, 10), (7, 1, 16), (10, 2, 80)]


def attend(library: Library, case: Case) -> tuple[Inputs, Tensor]:
    """What the program gives for a case, [tokens, heads, head_dim]."""
    inputs = Inputs(case)
    program = Program(library, case.dtype, len(inputs.query), 1)
    k_scale, v_scale = inputs.scales
    cache = LayerKV(*inputs.caches, k_scale, v_scale, 0, case.window, case.num_sink_tokens)
    options = {name: inputs.options[name] for name in ("soft_cap", "sinks", "alibi_slopes")}
    query = filled(program, inputs.query.flatten(1))
    out = program.paged_attention(query, case.heads, cache, case.head_dim**-0.5, **options)
    out.memory.fill_(math.nan)
    plan = inputs.plan(inputs.query_lens, inputs.seq_lens, inputs.tables, backend="native")
    program.run(
        arrays(
            len(inputs.query), cu_query_lens=plan.cu_query_lens, seq_lens=plan.seq_lens,
            groups=((torch.empty(0, dtype=torch.int64), plan.block_tables),),
        )
    )  # fmt: skip
    return inputs, out.memory.view_as(inputs.query)


def check(library: Library, case: Case) -> None:
    inputs, result = attend(library, case)
    exact, plain = inputs.expected(case, torch.float64), inputs.expected(case, case.dtype)
    assert_as_good_as_plain(result, exact, plain, inputs.query_lens)


@pytest.mark.parametrize("feature", list(WITHOUT_TREES))
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_any_mix_of_query_lengths_equals_the_definition(
    library: Library, heads: int, kv_heads: int, head_dim: int, block_size: int, feature: str
) -> None:
    check(library, Case(MANY, heads, kv_heads, head_dim, block_size, **WITHOUT_TREES[feature]))


@pytest.mark.parametrize("feature", list(WITHOUT_TREES))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_attention_in_bfloat16(library: Library, heads: int, kv_heads: int, head_dim: int, feature: str) -> None:
    check(library, Case(MANY, heads, kv_heads, head_dim, dtype=torch.bfloat16, **WITHOUT_TREES[feature]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", list(WITHOUT_TREES))
def test_long_contexts_that_are_shared_out(library: Library, feature: str, dtype: torch.dtype) -> None:
    check(library, Case(LONG, 6, 2, 32, dtype=dtype, **WITHOUT_TREES[feature]))


def test_every_length_around_the_edges_of_blocks(library: Library) -> None:
    check(library, Case(EVERY_LENGTH, 4, 2, 10))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("feature", ["plain", "sink_tokens", "all but trees"])
def test_a_quantised_cache(library: Library, feature: str, cache: torch.dtype, dtype: torch.dtype) -> None:
    sizes = {"plain": (100.0, 0.01, 30.0)}.get(feature, (1.0, 1.0, 1.0))
    case = Case(MANY, cache_dtype=cache, scales="token", dtype=dtype, sizes=sizes, **WITHOUT_TREES[feature])
    check(library, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", ["plain", "sink_tokens"])
def test_bits_depend_on_the_sequence_alone(library: Library, feature: str, dtype: torch.dtype) -> None:
    """Whole, in chunks, and token by token beside another sequence."""
    case = Case(((1300, 1300), (1, 37)), 6, 2, 32, dtype=dtype, **FEATURES[feature])
    inputs, whole = attend(library, case)
    cache = LayerKV(*inputs.caches, window=case.window, num_sink_tokens=case.num_sink_tokens)
    program = Program(library, dtype, 1301, 1)
    query = program.input(Rows.TOKENS, 6 * 32)
    out = program.paged_attention(query, 6, cache, 32**-0.5)
    for start, size in ((0, 1), (0, 600), (100, 7), (511, 1), (512, 1), (599, 701), (1298, 1), (1299, 1)):
        rows = inputs.query[start : start + size]
        query.memory[: size + 1] = torch.cat((rows, inputs.query[1300:])).flatten(1)
        plan = inputs.plan([size, 1], [start + size, 37], inputs.tables, backend="native")
        program.run(
            arrays(
                size + 1, cu_query_lens=plan.cu_query_lens, seq_lens=plan.seq_lens,
                groups=((torch.empty(0, dtype=torch.int64), plan.block_tables),),
            )
        )  # fmt: skip
        assert torch.equal(
            out.memory[: size + 1].view(-1, 6, 32), torch.cat((whole[start : start + size], whole[1300:]))
        )
