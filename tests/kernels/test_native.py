"""The native library's operations against their definitions, in every variant that this processor can run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nereid.native import ensure_built
from nereid_kernels.kv_write import plan_kv_write
from nereid_kernels.native.build import BuildError, variants
from nereid_kernels.native.library import Library, fitting_variant
from nereid_kernels.native.packing import (
    PackedWeight,
    QuantisedWeight,
    pack,
    pack_gated,
    pack_quantised,
    pack_quantised_gated,
)
from nereid_kernels.native.program import Buffer, LayerKV, Program, Rows, StepArrays
from nereid_kernels.native.quantising import quantise
from nereid_kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from nereid_kernels.reference import gated_activation as gated_reference
from nereid_kernels.reference import rms_norm as norm_reference
from tests.kernels.attention_cases import EVERY_LENGTH, FEATURES, Case, Inputs
from tests.kernels.bounds import assert_as_good_as_plain

MANY = tuple((1, n) for n in (1, 2, 6, 7, 8, 15, 16, 17, 33, 100)) + ((5, 129), (7, 7), (0, 3), (64, 200))
LONG = ((1, 511), (1, 512), (1, 513), (16, 1600), (17, 1601), (3, 2000), (700, 700))  # around a chunk of the keys
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 5, 6, 7, 12, 33)
PACKINGS = [pack, partial(pack_quantised, bits=8, group=64), partial(pack_quantised, bits=4, group=32)]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return ensure_built(print)
    except BuildError as error:
        pytest.skip(f"no native library: {error}")


@pytest.fixture(params=[variant.name for variant in variants()])
def library(folder: Path, request: pytest.FixtureRequest) -> Library:
    names = [variant.name for variant in variants()]  # the best first: each processor runs those behind its own
    best = fitting_variant()
    if best is None or names.index(request.param) < names.index(best):
        pytest.skip(f"this processor cannot run {request.param}")
    return Library(folder / f"{request.param}.so")


def arrays(num_tokens: int, **others: Any) -> StepArrays:
    """A step; what is not given is empty."""
    none = torch.empty(0, dtype=torch.int64)
    fields = {"token_ids": torch.zeros(num_tokens, dtype=torch.int64), "positions": none, "hidden_rows": none}
    return StepArrays(**{**fields, "cu_query_lens": none.int(), "seq_lens": none.int(), "groups": (), **others})


def filled(program: Program, x: Tensor, rows: Rows = Rows.TOKENS) -> Buffer:
    buffer = program.input(rows, x.shape[1])
    buffer.memory[: len(x)] = x
    return buffer


# ---- products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (63, 64), (64, 10), (65, 576), (200, 130)])
def test_products_equal_the_definition(
    library: Library, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        program = Program(library, dtype, rows, 1)
        narrow = program.matmul(filled(program, x), pack(weight, library.tile), bias)
        wide = program.matmul(filled(program, x), pack(weight, library.tile), wide=True)
        program.run(arrays(rows))
        exact = x.double() @ weight.double().T
        assert_as_good_as_plain(narrow.memory, exact + bias, ((x @ weight.T).float() + bias).to(dtype))
        assert_as_good_as_plain(wide.memory, exact, x.float() @ weight.float().T + 1e-6 * exact.abs().max().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", [2, 32, 48, 100])
def test_gated_products_equal_the_definition(library: Library, dtype: torch.dtype, out_features: int) -> None:
    gate, up = (torch.randn(out_features, 64).to(dtype) for _ in range(2))
    x = torch.randn(33, 64).to(dtype)
    program = Program(library, dtype, 33, 1)
    result = program.matmul(filled(program, x), pack_gated(gate, up, library.tile))
    program.run(arrays(33))

    def defined(at: torch.dtype) -> Tensor:
        both = torch.cat((x.to(at) @ gate.to(at).T, x.to(at) @ up.to(at).T), dim=1)
        return gated_reference.gated_activation(both, "silu")

    assert_as_good_as_plain(result.memory, defined(torch.float64), defined(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(8, 576), (8, 32), (4, 32), (4, 128)])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 2), (65, 576), (200, 130)])
def test_quantised_products_equal_the_definition(
    library: Library, dtype: torch.dtype, out_features: int, in_features: int, bits: int, group: int
) -> None:
    weight = torch.randn(out_features, in_features)
    codes, scales = quantise(weight, bits, group)
    dequantised = codes.double() * scales.double().repeat_interleave(group, dim=1)[:, :in_features]
    packed = pack_quantised(weight, library.tile, bits, group)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        program = Program(library, dtype, rows, 1)
        narrow = program.matmul(filled(program, x), packed)
        wide = program.matmul(filled(program, x), packed, wide=True)
        program.run(arrays(rows))
        exact = x.double() @ dequantised.T
        assert_as_good_as_plain(narrow.memory, exact, (x.float() @ dequantised.float().T).to(dtype))
        slack = 1e-6 * exact.abs().max().float()
        assert_as_good_as_plain(wide.memory, exact, x.float() @ dequantised.float().T + slack)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_gated_products_are_two_products(library: Library, bits: int) -> None:
    gate, up = (torch.randn(100, 64) for _ in range(2))
    x = torch.randn(9, 64)
    program = Program(library, torch.float32, 9, 1)
    gated = program.matmul(filled(program, x), pack_quantised_gated(gate, up, library.tile, bits, 32))
    apart = [program.matmul(filled(program, x), pack_quantised(w, library.tile, bits, 32)) for w in (gate, up)]
    program.run(arrays(9))
    torch.testing.assert_close(gated.memory, torch.nn.functional.silu(apart[0].memory) * apart[1].memory)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 1000), (4, 32), (4, 128)])
def test_quantising_errs_no_more_than_rounding_to_steps_of_the_largest_number(bits: int, group: int) -> None:
    """Rows of zeros, and a largest magnitude below 0, are exact."""
    weight = torch.randn(64, 1024)
    codes, scales = quantise(weight, bits, group)
    error = codes * scales.repeat_interleave(group, dim=1)[:, :1024] - weight
    steps = torch.stack([part.abs().amax(dim=1) for part in torch.split(weight, group, dim=1)], dim=1) / (
        2 ** (bits - 1) - 1
    )
    step = steps.repeat_interleave(group, dim=1)[:, :1024]
    rounded = (weight / step).round() * step - weight
    assert error.square().mean() <= rounded.square().mean() * (1.0 if bits == 8 else 0.9)
    assert not quantise(torch.zeros(3, 8), bits, 4)[0].any()
    codes, scales = quantise(torch.tensor([[-8.0, 7.0]]), bits, 2)
    torch.testing.assert_close(codes * scales, torch.tensor([[-8.0, 7.0]]), rtol=0.005, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", PACKINGS)
def test_a_row_of_a_product_has_the_same_bits_whatever_is_beside_it(
    library: Library, make: Callable[[Tensor, int], PackedWeight | QuantisedWeight], dtype: torch.dtype
) -> None:
    weight, x = torch.randn(200, 130).to(dtype), torch.randn(33, 130).to(dtype)
    program = Program(library, dtype, 33, 1)
    x_buffer = filled(program, x)
    y = program.matmul(x_buffer, make(weight, library.tile))
    program.run(arrays(33))
    whole = y.memory.clone()
    for rows in range(1, 14):
        for start in (0, 3, 33 - rows):
            x_buffer.memory[:rows] = x[start : start + rows]
            program.run(arrays(rows))
            assert torch.equal(y.memory[:rows], whole[start : start + rows])


def test_rows_past_the_step_are_left_alone(library: Library) -> None:
    program = Program(library, torch.float32, 8, 1)
    y = program.matmul(filled(program, torch.randn(8, 64)), pack(torch.randn(70, 64), library.tile))
    y.memory.fill_(7.0)
    program.run(arrays(5))
    assert bool((y.memory[5:] == 7.0).all()) and not bool((y.memory[:5] == 7.0).any())


# ---- norms and rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 576, 1000])
def test_norms_equal_the_definition(library: Library, dtype: torch.dtype, width: int) -> None:
    x, residual = (torch.randn(5, width).to(dtype) for _ in range(2))
    weight = torch.randn(width)
    program = Program(library, dtype, 5, 1)
    alone = program.rms_norm(filled(program, x), weight, 1e-5, weight_offset=1.0)
    normed, total = program.add_rms_norm(filled(program, x), filled(program, residual), weight, 1e-5)
    program.run(arrays(5))
    assert torch.equal(total.memory, x + residual)
    for result, source, offset in ((alone, x, 1.0), (normed, x + residual, 0.0)):
        exact = norm_reference.rms_norm(source.double(), weight.double(), 1e-5, weight_offset=offset)
        plain = norm_reference.rms_norm(source, weight.to(dtype), 1e-5, weight_offset=offset)
        assert_as_good_as_plain(result.memory, exact, plain)


def test_rows_are_taken_by_number(library: Library) -> None:
    table = torch.randn(50, 24)
    program = Program(library, torch.float32, 6, 4)
    hidden = program.hidden_rows(program.take_rows(table))
    tokens, rows = torch.tensor([3, 0, 49, 49, 7, 1]), torch.tensor([5, 0, 3])
    program.run(arrays(6, token_ids=tokens, hidden_rows=rows))
    assert torch.equal(hidden.memory[:3], table[tokens[rows]])


# ---- rotary embedding and KV write


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "block_size"), [(64, 64, 16), (10, 6, 7), (80, 40, 1)])
def test_what_is_turned_and_stored_equals_the_other_implementation(
    library: Library,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    heads, kv_heads, tokens, num_blocks = 6, 2, 9, 12
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    qkv[0, heads * head_dim :] = 0.0  # a row whose largest number is 0
    angles = torch.rand(40, rotary_dim) * 6
    cos_sin, positions = torch.stack((angles.cos(), angles.sin()), dim=1), torch.randperm(40)[:tokens]
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    shape = (num_blocks, 2, 2, kv_heads, block_size)
    caches = [torch.zeros(*shape, head_dim, dtype=cache_dtype or dtype) for _ in range(2)]
    scales = [torch.zeros(shape) if cache_dtype else None for _ in range(2)]
    layers = [
        LayerKV(pool[:, 1, 0], pool[:, 1, 1], None if scale is None else scale[:, 1, 0],
                None if scale is None else scale[:, 1, 1])
        for pool, scale in zip(caches, scales, strict=True)
    ]  # fmt: skip
    program = Program(library, dtype, tokens, 1)
    turned = filled(program, qkv)
    program.rotary_kv_write(turned, cos_sin, layers[0])
    program.run(arrays(tokens, positions=positions, groups=((slots, torch.zeros(1, 1, dtype=torch.int32)),)))
    other = layers[1]
    expected = qk_norm_rope_kv_write(
        qkv, cos_sin[positions], other.k, other.v, plan_kv_write(slots, other.k), k_scale=other.k_scale,
        v_scale=other.v_scale,
    )  # fmt: skip
    # A product and a sum may be rounded once or twice.
    rtol, atol = 2 * torch.finfo(dtype).eps, 4e-7 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(turned.memory[:, : heads * head_dim], expected.flatten(1), rtol=rtol, atol=atol)
    stored, wanted = (pool.float() for pool in caches)
    if cache_dtype:
        stored, wanted = (
            pool.float() * scale[..., None] for pool, scale in zip(caches, scales, strict=True) if scale is not None
        )
        rtol = 0.5 if cache_dtype == torch.int8 else 0.07  # to the next code
        atol = float(wanted.abs().max()) / 100
    assert bool((stored != 0).any())
    torch.testing.assert_close(stored, wanted, rtol=rtol, atol=atol)


# ---- attention


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


WITHOUT_TREES = {name: options for name, options in FEATURES.items() if "tree" not in options}
WITHOUT_TREES["all but trees"] = {**FEATURES["all"], "tree": False}
SHAPES = [(9, 3, 64), (4, 4, 10), (7, 1, 16), (10, 2, 80)]


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


# ---- programs


def test_a_buffer_is_used_again_once_nobody_holds_it(library: Library) -> None:
    program = Program(library, torch.float32, 4, 1)
    x = filled(program, torch.randn(4, 64))
    weight = pack(torch.eye(64), library.tile)
    first = program.matmul(x, weight)
    second = program.matmul(first, weight)
    address = first.address
    del first
    assert program.matmul(second, weight).address == address
