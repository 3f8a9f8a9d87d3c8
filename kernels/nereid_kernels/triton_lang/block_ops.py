"""The kernel of copy_blocks, gather_blocks and scatter_blocks: one program for a chunk of one block.

Blocks are copied as integers of 4 bytes, 16 bytes an access, whatever their elements are; as bytes where a block's size
or place is no multiple of 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose


@triton.jit(do_not_specialize=["ids_stride"])
def _copy_blocks(
    source_ptr: tl.tensor,  # [blocks, WORDS]
    destination_ptr: tl.tensor,  # [blocks, WORDS]
    source_ids_ptr: tl.tensor,  # [n], or None: the i-th copy reads block i
    destination_ids_ptr: tl.tensor,  # [n], or None: the i-th copy writes block i
    ids_stride: tl.tensor,
    source_stride: tl.tensor,  # numbers, lest each buffer's be compiled for; that 16 divides one is seen all the same
    destination_stride: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    copy = tl.program_id(0).to(tl.int64)
    source = copy
    destination = copy
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + copy * ids_stride)
    if destination_ids_ptr is not None:
        destination = tl.load(destination_ids_ptr + copy * ids_stride)
    if (source < 0) | (destination < 0):
        return
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = words < WORDS
    found = tl.load(source_ptr + source * source_stride + words, mask=mask)
    tl.store(destination_ptr + destination * destination_stride + words, found, mask=mask)


def launch_copy_blocks(pool: Tensor, pairs: Tensor, architecture: str | None = None) -> Launch:
    """For the tensors see `nereid_kernels.block_ops`.  architecture: pool's device's own, unless it is compiled for
    another."""
    return _launch(pool, pool, pairs[:, 0], pairs[:, 1], architecture)


def launch_gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor, architecture: str | None = None) -> Launch:
    return _launch(pool, out, block_ids, None, architecture)


def launch_scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor, architecture: str | None = None) -> Launch:
    return _launch(source, pool, None, block_ids, architecture)


def _launch(
    source: Tensor,
    destination: Tensor,
    source_ids: Tensor | None,
    destination_ids: Tensor | None,
    architecture: str | None,
) -> Launch:
    ids = source_ids if source_ids is not None else destination_ids
    assert ids is not None
    config = choose("copy_blocks", architecture or architecture_of(source.device))
    source_words, destination_words = _as_words(source, destination)
    arguments = {
        "source_ptr": source_words,
        "destination_ptr": destination_words,
        "source_ids_ptr": source_ids,
        "destination_ids_ptr": destination_ids,
        "ids_stride": ids.stride(0),
        "source_stride": source_words.stride(0),
        "destination_stride": destination_words.stride(0),
        "WORDS": source_words.shape[1],
        **config.tiles,
    }
    grid = (ids.shape[0], triton.cdiv(source_words.shape[1], config.tiles["BLOCK"]))
    return Launch(_copy_blocks, grid, arguments, config.num_warps, config.num_stages)


def _as_words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each as [blocks, words of a block] int32 where all allow it, uint8 otherwise; the same memory."""
    flat = (t.as_strided((t.shape[0], t.shape[1:].numel()), (t.stride(0), 1)) for t in tensors)
    rows = tuple(row.view(torch.uint8) for row in flat)
    if any(size % 4 for row in rows for size in (row.shape[1], row.stride(0), row.storage_offset())):
        return rows
    return tuple(row.view(torch.int32) for row in rows)
