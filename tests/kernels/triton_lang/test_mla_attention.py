"""mla_attention against its definition: any mix of query lengths, odd sizes, splits, and what must not be read."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nereid_kernels import mla_attention as ops
from nereid_kernels.launch import run
from nereid_kernels.reference import mla_attention as reference
from nereid_kernels.splitting import SPLIT_QUERY
from nereid_kernels.triton_lang import mla_attention as kernels
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.triton_lang.devices import BACKENDS, Reserve

# (query length, sequence length); the interpreter's row of the launch table splits sequences of more than 32 keys.
MIXED = ((1, 1), (1, 32), (0, 0), (1, 33), (17, 17), (4, 131), (16, 40), (20, 70), (0, 5))


@dataclass(frozen=True, slots=True)
class Case:
    sequences: tuple[tuple[int, int], ...] = MIXED
    heads: int = 3
    latent: int = 24
    rope: int = 5
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    padding: int = 0  # query tokens that belong to no sequence


def make_arguments(case: Case) -> dict[str, Any]:
    """Of the operation. Slots and entries of block tables that nobody owns are NaN and far out of bounds."""
    query_lens, seq_lens = (list(lens) for lens in zip(*case.sequences, strict=True))
    width = case.latent + case.rope
    needed = [-(-seq_len // case.block_size) for seq_len in seq_lens]
    free = list(range(1, sum(needed) + 1))
    random.Random(1).shuffle(free)
    pool = torch.full((len(free) + 1, 2, 1, case.block_size, width), math.nan, dtype=case.dtype)
    cache = pool[:, 1]  # the second of two layers
    block_tables = torch.full((len(seq_lens), max(needed) + 1), 1 << 30, dtype=torch.int32)
    for row, (count, seq_len) in enumerate(zip(needed, seq_lens, strict=True)):
        table = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        block_tables[row, :count] = table
        positions = torch.arange(seq_len)
        slots = table[positions // case.block_size].long(), positions % case.block_size
        cache[slots[0], 0, slots[1]] = torch.randn(seq_len, width).to(case.dtype)
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return {
        "query": torch.randn(sum(query_lens) + case.padding, case.heads, width).to(case.dtype),
        "cache": cache,
        "block_tables": block_tables,
        "cu_query_lens": cu_query_lens,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "max_query_len": max(query_lens),
        "scale": width**-0.5,
        "latent_dim": case.latent,
    }


def define(arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The reference, computed in `dtype`."""
    names = ("block_tables", "cu_query_lens", "seq_lens", "scale", "latent_dim")
    query, cache = arguments["query"].to(dtype), arguments["cache"].to(dtype)
    return reference.mla_attention(query, cache, **{name: arguments[name] for name in names})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype=torch.bfloat16),
        Case(dtype=torch.float16, heads=16, block_size=7),
        Case(((1, 200), (2, 3), (16, 16)), heads=5, latent=123, rope=1, block_size=1),
        Case(((1, 129),), heads=128, latent=16, rope=16, block_size=64),
        Case(((19, 19),), heads=1, latent=1, rope=1, block_size=32),
        Case(((1, 70), (3, 40)), heads=16, latent=512, rope=64, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_equals_its_definition(case: Case, backend: str) -> None:
    arguments = make_arguments(case)
    out = ops.mla_attention(**arguments, backend=backend)
    assert_as_good_as_plain(out, define(arguments, torch.float64), define(arguments, case.dtype))


def test_strided_queries_and_tables() -> None:
    arguments = make_arguments(Case(((1, 50), (2, 20))))
    expected = ops.mla_attention(**arguments, backend="triton_lang")
    tokens, heads, width = arguments["query"].shape
    query = torch.full((heads, tokens, 2 * width), math.nan)[..., :width].transpose(0, 1)
    tables = torch.full((2, 99), 1 << 30, dtype=torch.int32)[:, : arguments["block_tables"].shape[1]]
    arguments |= {
        "query": query.copy_(arguments["query"]),
        "block_tables": tables.copy_(arguments["block_tables"]),
    }
    assert torch.equal(ops.mla_attention(**arguments, backend="triton_lang"), expected)


def test_a_result_does_not_depend_on_the_batch() -> None:
    arguments = make_arguments(Case())
    together = ops.mla_attention(**arguments, backend="triton_lang")
    starts = arguments["cu_query_lens"].tolist()
    for index in (3, 5):
        query_len = starts[index + 1] - starts[index]
        alone = arguments | {
            "query": arguments["query"][starts[index] : starts[index + 1]],
            "block_tables": arguments["block_tables"][index : index + 1],
            "cu_query_lens": torch.tensor([0, query_len], dtype=torch.int32),
            "seq_lens": arguments["seq_lens"][index : index + 1],
            "max_query_len": query_len,
        }
        out = ops.mla_attention(**alone, backend="triton_lang")
        assert torch.equal(out, together[starts[index] : starts[index + 1]])


def test_a_block_past_two_to_the_31_elements(reserve: Reserve) -> None:
    arguments = make_arguments(Case(((1, 40),), dtype=torch.float16))
    expected = ops.mla_attention(**arguments, backend="triton_lang")
    cache = arguments["cache"]
    stride = (1 << 31) // (len(cache) - 1) + 16
    size = stride * (len(cache) - 1) + cache[0].numel()
    far = reserve(size, torch.float16).as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)
    assert arguments["block_tables"].eq(len(cache) - 1).any() and stride * (len(cache) - 1) > 1 << 31
    assert torch.equal(ops.mla_attention(**arguments | {"cache": far}, backend="triton_lang"), expected)


def launch_into(out: Tensor, arguments: dict[str, Any]) -> int:
    """How many launches it took."""
    others = {name: value for name, value in arguments.items() if name != "latent_dim"}
    launches = kernels.launch_mla_attention(**others, out=out)
    for launch in launches:
        run(launch)
    return len(launches)


def test_padding_is_written_nowhere_and_rounds_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(((1, 0), (1, 40), (0, 0), (2, 50), (17, 33)), padding=3)
    arguments = make_arguments(case)
    one_round, rounds = (torch.full((24, case.heads, case.latent), 7.0) for _ in range(2))
    assert launch_into(one_round, arguments) == 3
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 4 * SPLIT_QUERY * 4 * (case.latent + 2) * 9)
    assert launch_into(rounds, arguments) > 3
    assert torch.equal(rounds, one_round)
    assert rounds[21:].eq(7).all()  # no sequence
    assert_as_good_as_plain(rounds[:21], define(arguments, torch.float64)[:21], define(arguments, case.dtype)[:21])


@pytest.mark.parametrize("sequences", [((3, 0),), ((1, 0), (17, 0), (2, 9)), ((3, 2), (40, 33), (16, 5))])
def test_a_query_token_that_sees_no_key_gets_zeros(sequences: tuple[tuple[int, int], ...]) -> None:
    """Also where the block table has no column."""
    arguments = make_arguments(Case(sequences))
    for tables in (arguments["block_tables"], arguments["block_tables"][:, :-1]):
        out = torch.full((sum(q for q, _ in sequences), 3, 24), math.nan)
        launch_into(out, arguments | {"block_tables": tables})
        assert_as_good_as_plain(out, define(arguments, torch.float64), define(arguments, torch.float32))
        start = 0
        for query_len, seq_len in sequences:
            assert out[start : start + max(query_len - seq_len, 0)].eq(0).all()
            start += query_len


@pytest.mark.parametrize("sequences", [((0, 0),), ((0, 9), (0, 0))])
def test_no_query_token(sequences: tuple[tuple[int, int], ...]) -> None:
    out = ops.mla_attention(**make_arguments(Case(sequences)), backend="triton_lang")
    assert out.shape == (0, 3, 24)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"latent_dim": 29}, ValueError, "latent_dim: got 29; allowed: 1 to 28"),
        ({"max_query_len": -1}, ValueError, "max_query_len: got -1"),
        ({"cache": torch.zeros(4, 2, 16, 29)}, ValueError, r"cache: got shape \[4, 2, 16, 29\]"),
        ({"cache": torch.zeros(4, 1, 16, 29).half()}, TypeError, "cache: got torch.float16; allowed: torch.float32"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, TypeError, "seq_lens: got torch.int64; allowed: torch.int32"),
        ({"cu_query_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"cu_query_lens: got shape \[3\]"),
        ({"query": torch.zeros(1, 29, 3).transpose(1, 2)}, ValueError, "query: got strides"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ops.mla_attention(**make_arguments(Case(((1, 5),))) | change, backend="triton_lang")


def test_the_operation_is_registered_rightly() -> None:
    arguments = make_arguments(Case(((1, 40),)))
    torch.library.opcheck(ops._mla_attention, tuple(arguments.values()), test_utils=("test_schema", "test_faketensor"))
