"""The formulas of nereid_kernels.cost against what the interpreter counts when it runs the very launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from nereid_kernels.cost import count
from nereid_kernels.formats import scale_dtype
from nereid_kernels.launch import Launch, run
from nereid_kernels.splitting import SPLIT_QUERY
from nereid_kernels.triton_lang import paged_attention
from nereid_kernels.triton_lang.block_ops import launch_copy_blocks, launch_gather_blocks
from nereid_kernels.triton_lang.gated_activation import launch_gated_activation
from nereid_kernels.triton_lang.kv_write import launch_kv_write
from nereid_kernels.triton_lang.matmul import launch_matmul
from nereid_kernels.triton_lang.mla_attention import launch_mla_attention
from nereid_kernels.triton_lang.paged_attention import Operands, launch_paged_attention
from nereid_kernels.triton_lang.penalties import launch_penalties
from nereid_kernels.triton_lang.qk_norm_rope_kv_write import launch_qk_norm_rope_kv_write
from nereid_kernels.triton_lang.quantised_matmul import launch_matmul_int4, launch_matmul_int8
from nereid_kernels.triton_lang.rms_norm import launch_rms_norm
from tests.kernels.triton_lang.counting import counting
from tests.kernels.triton_lang.devices import interpreter_only

pytestmark = interpreter_only


def assert_counted(*launches: Launch, integers: Sequence[str] = ()) -> None:
    """integers: arguments of int32 that are no indices, where they are given and the kernel has them."""
    for launch in launches:
        found = (launch.arguments.get(name) for name in integers)
        with counting(*(tensor for tensor in found if tensor is not None)) as counter:
            run(launch)
        assert count([launch]) == counter.cost(), launch.name


@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(residual: bool) -> None:
    x, other, out, total = torch.randn(4, 5, 123, dtype=torch.bfloat16)
    weight = torch.randn(123)
    pair = (other, total) if residual else (None, None)
    assert_counted(launch_rms_norm(x, pair[0], weight, out, pair[1], 1e-5, 0.0))


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(lengths: list[tuple[int, int]], max_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block tables, cu_query_lens and seq_lens of (query_len, seq_len) each."""
    tables = torch.arange(1, 1 + max_blocks * len(lengths), dtype=torch.int32).view(len(lengths), max_blocks)
    queries = [0, *itertools.accumulate(query_len for query_len, _ in lengths)]
    return tables, int32(queries), int32([seq_len for _, seq_len in lengths])


@pytest.mark.parametrize("rows", [0, 5, 70])
def test_matmul(rows: int) -> None:
    x, weight, out = torch.zeros(rows, 70), torch.zeros(100, 70), torch.zeros(rows, 100)
    assert_counted(launch_matmul(x, weight, torch.zeros(100) if rows == 5 else None, out))


@pytest.mark.parametrize("groups", [1, 3])
def test_matmul_int8(groups: int) -> None:
    x, out = torch.zeros(5, 96), torch.zeros(5, 100)
    scales = torch.zeros(100) if groups == 1 else torch.zeros(100, groups)
    assert_counted(launch_matmul_int8(x, torch.zeros(100, 96, dtype=torch.int8), scales, out))


@pytest.mark.parametrize("zero_points", [False, True])
def test_matmul_int4(zero_points: bool) -> None:
    x, out, packed = torch.zeros(35, 96), torch.zeros(35, 100), torch.zeros(100, 48, dtype=torch.uint8)
    zeros = torch.zeros(100, 3, dtype=torch.uint8) if zero_points else None
    assert_counted(launch_matmul_int4(x, packed, torch.zeros(100, 3), zeros, out, 32))


SCALES = ("k_scale_ptr", "v_scale_ptr")
SHORT, LONG = range(SPLIT_QUERY + 1), range(SPLIT_QUERY + 1, 1000)
LENGTHS = [[(1, 300), (3, 40), (2, 2)], [(1, 70), (37, 100), (5, 5)], [(2, 0), (20, 0), (3, 17)]]


@pytest.mark.parametrize("num_sink_tokens", [0, 5, 32, 70])
@pytest.mark.parametrize(("window", "scales"), [(0, ()), (50, (1,)), (0, (2,)), (50, (64, 2, 16))])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_paged_attention(
    lengths: list[tuple[int, int]], window: int, scales: tuple[int, ...], num_sink_tokens: int
) -> None:
    tokens, heads, kv_heads, head_dim = sum(q for q, _ in lengths), 6, 2, 24
    short, long = (
        max((q for q, _ in lengths if (q <= SPLIT_QUERY) == is_short), default=0) for is_short in (True, False)
    )
    pool = torch.zeros(64, 2, kv_heads, 16, head_dim, dtype=torch.int8 if scales else torch.float16)
    query, out = torch.zeros(2, tokens, heads, head_dim, dtype=torch.float16)
    tables, cu_query_lens, seq_lens = batch(lengths, 20)
    extras: dict[str, torch.Tensor] = (
        {"sinks": torch.zeros(heads), "alibi_slopes": torch.zeros(heads)} if window else {}
    )
    if scales:
        dtype = scale_dtype(torch.int8, by_token=len(scales) == 3)
        extras |= {"k_scale": torch.ones(scales, dtype=dtype), "v_scale": torch.ones(scales, dtype=dtype)}
    operands = Operands(query, pool[:, 0], pool[:, 1], out, tables, cu_query_lens, seq_lens, **extras)
    launches = launch_paged_attention(operands, short, long, 0.2, window, num_sink_tokens if window else 0, 0.0)
    assert_counted(*launches, integers=SCALES)


def test_rounds_of_paged_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "WORKSPACE_BYTES", 1)
    test_paged_attention(LENGTHS[0], 0, (), 0)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_mla_attention(lengths: list[tuple[int, int]]) -> None:
    tokens, heads, latent, rope, longest = sum(q for q, _ in lengths), 5, 40, 8, max(q for q, _ in lengths)
    cache = torch.zeros(64, 1, 16, latent + rope)
    query, out = torch.zeros(tokens, heads, latent + rope), torch.zeros(tokens, heads, latent)
    assert_counted(*launch_mla_attention(query, cache, *batch(lengths, 20), out, longest, 0.2))


@pytest.mark.parametrize("rows", [0, 3])
def test_gated_activation(rows: int) -> None:
    assert_counted(launch_gated_activation(torch.zeros(rows, 2 * 700), torch.zeros(rows, 700), "silu"))


BY_TOKEN = (4, 3, 16)
CACHES = [
    (torch.float16, ()), (torch.int8, (1,)), (torch.int8, (3,)), (torch.int8, BY_TOKEN), (torch.float8_e4m3fn, BY_TOKEN)
]  # fmt: skip


def cache(dtype: torch.dtype, scales: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool's keys and values [4 blocks, 3 KV heads, 16 slots, head_dim 24], and a scale of either."""
    scale = torch.ones(2, *scales, dtype=scale_dtype(dtype, by_token=scales == BY_TOKEN))
    return torch.zeros(2, 4, 3, 16, 24, dtype=dtype), scale


@pytest.mark.parametrize(("dtype", "scales"), CACHES)
@pytest.mark.parametrize("tokens", [0, 5])
def test_kv_write(tokens: int, dtype: torch.dtype, scales: tuple[int, ...]) -> None:
    pool, scale = cache(dtype, scales)
    pair = (scale[0], scale[1]) if scales else (None, None)
    key, value = torch.zeros(2, tokens, 3, 24, dtype=torch.float16)
    launch = launch_kv_write(key, value, pool[0], pool[1], torch.arange(20, 20 + tokens), *pair)
    assert_counted(launch, integers=SCALES)


@pytest.mark.parametrize(("dtype", "scales"), CACHES)
@pytest.mark.parametrize("has_weights", [False, True])
def test_qk_norm_rope_kv_write(has_weights: bool, dtype: torch.dtype, scales: tuple[int, ...]) -> None:
    tokens, heads = 5, 9
    pool, scale = cache(dtype, scales)
    pair = (scale[0], scale[1]) if scales else (None, None)
    qkv, query = torch.zeros(tokens, (heads + 6) * 24).half(), torch.zeros(tokens, heads, 24).half()
    q_weight, k_weight = (torch.ones(24).half(), torch.ones(24).half()) if has_weights else (None, None)
    written = (query, pool[0], pool[1], torch.arange(20, 20 + tokens))
    angles = torch.ones(tokens, 2, 16)
    launch = launch_qk_norm_rope_kv_write(qkv, angles, *written, q_weight, k_weight, 1e-6, 0.0, *pair)
    assert_counted(launch, integers=SCALES)


@pytest.mark.parametrize("width", [24, 6000])
def test_copy_blocks(width: int) -> None:
    pool, pairs = torch.zeros(8, width, dtype=torch.float16), torch.tensor([[1, 5], [2, 6], [3, 7]])
    assert_counted(launch_copy_blocks(pool, pairs), integers=["source_ptr"])  # the destination's, too
    gathered = launch_gather_blocks(pool, pairs[:, 0].contiguous(), torch.zeros(3, width).half())
    assert_counted(gathered, integers=["source_ptr", "destination_ptr"])


@pytest.mark.parametrize("rows", [0, 3])
def test_penalties(rows: int) -> None:
    logits, scale = torch.zeros(rows, 3000), torch.full((rows,), 1.1)
    counts = torch.ones(rows, 3000, dtype=torch.int32)
    assert_counted(
        launch_penalties(logits, counts, counts.bool(), scale, scale.clone(), scale.clone()), integers=["counts_ptr"]
    )


def test_a_kernel_without_a_formula_is_refused() -> None:
    def other() -> None: ...

    with pytest.raises(ValueError, match="got other; allowed: .*rms_norm"):
        count([Launch(SimpleNamespace(fn=other), (1,), {}, 1, 1)])
