"""copy_blocks, gather_blocks and scatter_blocks: exact copies, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nereid_kernels import block_ops as ops
from nereid_kernels.reference import block_ops as reference
from tests.kernels.triton_lang.devices import BACKENDS, Reserve

BLOCKS = 7
IDS = torch.tensor([5, -1, 2])


def make_pool(dtype: torch.dtype, *shape: int, blocks: int = BLOCKS) -> Tensor:
    """Random bytes, NaN patterns among them."""
    size = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(256, (blocks, size), dtype=torch.uint8).view(dtype).view(blocks, *shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (2, 2, 3, 16, 24)),
        (torch.float8_e4m3fn, (5, 123)),  # no multiple of 4 bytes
        (torch.int8, (1,)),
        (torch.float32, (5000,)),  # more than a program takes
        (torch.int64, (3, 7)),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_its_definition(dtype: torch.dtype, shape: tuple[int, ...], backend: str) -> None:
    pool, rows = make_pool(dtype, *shape), make_pool(dtype, *shape, blocks=3)
    expected_pool, expected_rows = pool.clone(), rows.clone()

    pairs = torch.tensor([[1, 6], [-1, -1], [1, 0], [4, 3]])
    ops.copy_blocks(pool, pairs, backend=backend)
    reference.copy_blocks(expected_pool, pairs)
    assert torch.equal(bits(pool), bits(expected_pool))

    ops.gather_blocks(pool, IDS, rows, backend=backend)
    reference.gather_blocks(expected_pool, IDS, expected_rows)
    assert torch.equal(bits(rows), bits(expected_rows))

    new = make_pool(dtype, *shape, blocks=3)
    ops.scatter_blocks(pool, IDS, new, backend=backend)
    reference.scatter_blocks(expected_pool, IDS, new)
    assert torch.equal(bits(pool), bits(expected_pool))


def test_strided_and_unaligned_blocks() -> None:
    """Blocks that are parts of wider ones, and begin at an odd byte: no other byte changes."""
    whole = make_pool(torch.uint8, 64)
    expected = whole.clone()
    expected[5, 3:35], expected[2, 3:35] = expected[6, 3:35].clone(), expected[0, 3:35].clone()
    ops.copy_blocks(whole[:, 3:35], torch.tensor([[6, 5], [0, 2]]), backend="triton_lang")
    assert torch.equal(whole, expected)


def test_nothing_to_copy() -> None:
    pool = make_pool(torch.float32, 8)
    before = pool.clone()
    none = torch.empty(0, dtype=torch.int64)
    ops.copy_blocks(pool, none.view(0, 2), backend="triton_lang")
    ops.scatter_blocks(pool, none, pool[:0], backend="triton_lang")
    ops.gather_blocks(pool, none, pool[:0], backend="triton_lang")
    assert torch.equal(bits(pool), bits(before))


def test_a_block_past_two_to_the_31_words(reserve: Reserve) -> None:
    pool = reserve(12 << 30, torch.uint8).view(12 << 10, 1 << 20)[:, : 4 << 10]
    last = pool.shape[0] - 1
    assert last * pool.stride(0) // 4 > 1 << 31
    pool[1] = make_pool(torch.uint8, 4 << 10, blocks=1)[0]
    out = torch.zeros(1, 4 << 10, dtype=torch.uint8)
    ops.copy_blocks(pool, torch.tensor([[1, last]]), backend="triton_lang")
    ops.gather_blocks(pool, torch.tensor([last]), out, backend="triton_lang")
    assert torch.equal(pool[last], pool[1]) and torch.equal(out[0], pool[1]) and pool[1].any()


def test_refuses_what_does_not_fit() -> None:
    pool = make_pool(torch.float32, 4, 6)
    with pytest.raises(ValueError, match=r"pairs: got shape \[3\]"):
        ops.copy_blocks(pool, IDS)
    with pytest.raises(TypeError, match="block_ids: got torch.int32"):
        ops.gather_blocks(pool, IDS.int(), pool[:3])
    with pytest.raises(ValueError, match=r"out: got shape \[7, 4, 6\]"):
        ops.gather_blocks(pool, IDS, pool)
    with pytest.raises(TypeError, match="source: got torch.float64"):
        ops.scatter_blocks(pool, IDS, pool[:3].double())
    with pytest.raises(ValueError, match="pool: got shape .* whose blocks are contiguous"):
        ops.copy_blocks(pool.transpose(1, 2), IDS[:, None].expand(3, 2))


def test_are_proper_operations() -> None:
    pool, rows = make_pool(torch.int32, 8), make_pool(torch.int32, 8, blocks=3)
    for operation, arguments in (
        (ops._copy_blocks, (pool, torch.tensor([[1, 2]]))),
        (ops._gather_blocks, (pool, IDS, rows)),
        (ops._scatter_blocks, (pool, IDS, rows)),
    ):
        torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))
