"""matmul on the CPU has the same bits for a row whatever rows are beside it, by the libraries of this machine."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nereid_kernels.cpu.matmul import BASE_TILE, _cut, matmul, row_tiles
from nereid_kernels.reference import matmul as reference
from tests.kernels.bounds import assert_as_good_as_plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMOLLM2 = [(576, 960), (576, 3072), (1536, 576), (576, 576)]
ODD = [(1, 1), (7, 3), (16, 2), (64, 1), (123, 45), (1, 64), (33, 100), (2049, 17), (123, 24), (16, 33), (4097, 130)]
ROWS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 129, 257, 513)


def tiles_or_skip(weight: torch.Tensor) -> tuple[int, ...]:
    """Those of `row_tiles`; a model with such a weight is refused with `deterministic` where there are none."""
    tiles = row_tiles(weight)
    if not tiles:
        pytest.skip(f"this processor's libraries, with {torch.get_num_threads()} threads, have none for {weight.shape}")
    return tiles


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(threads)
    none: list[tuple[int, int]] = []
    for in_features, out_features in [*SMOLLM2, *ODD] if dtype != torch.float16 else ODD:
        x, weight = torch.randn(520, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
        tiles = row_tiles(weight)
        if not tiles:
            none.append((in_features, out_features))
            continue
        whole = matmul(x, weight, None)
        for row in range(10):  # alone, from every place within a tile
            assert torch.equal(matmul(x[row : row + 1], weight, None, tiles), whole[row : row + 1])
        for rows in ROWS:
            start = rows % 6  # any place among the rows; addresses that are not aligned
            part = matmul(x[start : start + rows], weight, None, tiles)
            assert torch.equal(part, whole[start : start + rows]), (in_features, out_features, start, rows)
    if none:  # `deterministic` is refused there
        pytest.skip(f"with {threads} threads this processor's libraries have no such tiles for {none}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_strides_nor_addresses_matter(threads: int, dtype: torch.dtype) -> None:
    for in_features, out_features in ODD:
        x, weight = torch.randn(24, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
        whole = matmul(x, weight, None)
        strided = torch.full((24, in_features + 5), torch.nan, dtype=dtype)[:, 1:-4].copy_(x)
        assert torch.equal(matmul(strided, weight, None), whole)
        moved = torch.empty(weight.numel() + 1, dtype=dtype)[1:].view_as(weight).copy_(weight)
        assert torch.equal(matmul(x, moved, None), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 18, 64])
def test_what_lies_behind_a_row_is_no_part_of_it(threads: int, rows: int, dtype: torch.dtype) -> None:
    """Nor a NaN of the next row, where one row is another request's."""
    weight = torch.randn(70, 63).to(dtype)
    behind = torch.full((rows, 64), torch.nan, dtype=dtype)[:, :63].copy_(torch.randn(rows, 63))
    tiles = tiles_or_skip(weight)
    assert matmul(behind, weight, None, tiles).isfinite().all()
    beside = torch.randn(rows + 1, 63).to(dtype)
    beside[-1] = torch.nan
    assert matmul(beside, weight, None, tiles)[:-1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary(threads: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 576).to(dtype), torch.randn(49152, 576).to(dtype)
    tiles, whole = tiles_or_skip(weight), matmul(x, weight, None)
    for start, end in ((0, 1), (8, 9), (3, 5)):
        assert torch.equal(matmul(x[start:end], weight, None, tiles), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(0, 5, 3), (1, 1, 1), (5, 123, 45), (517, 64, 20)])
def test_equals_its_definition(rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    exact = reference.matmul(x.double(), weight.double(), bias.double())
    out = matmul(x, weight, bias)
    assert out.is_contiguous()
    tile = functional.pad(x, (0, 0, 0, -rows % BASE_TILE))  # of other numbers of rows the library's error is another
    assert_as_good_as_plain(out, exact, reference.matmul(tile, weight, bias)[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 123), (1, 64), (3072, 576)])
def test_a_tile_of_the_base_size_is_among_those_that_agree(
    threads: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    before = torch.random.get_rng_state()
    tiles = tiles_or_skip(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    assert BASE_TILE in tiles and list(tiles) == sorted(tiles, reverse=True)
    assert torch.equal(before, torch.random.get_rng_state())


def test_tiles_cover_all_rows_with_little_waste() -> None:
    for tiles in ((512, 256, 128, 64, 32, 16, 8, 4), (256, 16), (16,)):
        for rows in range(1, 1100):
            sizes = _cut(rows, tiles)
            assert set(sizes) <= set(tiles) and sizes == sorted(sizes, reverse=True)
            assert rows <= sum(sizes) < rows + max(tiles[-1], sizes[-1] // 2)
