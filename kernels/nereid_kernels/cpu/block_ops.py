"""copy_blocks, gather_blocks and scatter_blocks on the CPU, on the bytes of each block.

Each block is one plain copy on the calling thread: a block is small, and torch would wake its threads for it, which
takes longer, and ten times as long where the processor has other work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    blocks = as_bytes(pool)
    _copy_rows(blocks, blocks, pairs.tolist())


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    _copy_rows(as_bytes(pool), as_bytes(out), ((block, row) for row, block in enumerate(block_ids.tolist())))


def scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor) -> None:
    _copy_rows(as_bytes(source), as_bytes(pool), enumerate(block_ids.tolist()))


def as_bytes(blocks: Tensor) -> Tensor:
    """[blocks, bytes of a block] uint8, the same memory. Each block of `blocks` is contiguous."""
    width = blocks.shape[1:].numel()
    return blocks.as_strided((blocks.shape[0], width), (blocks.stride(0), 1)).view(torch.uint8)


def _copy_rows(sources: Tensor, targets: Tensor, pairs: Iterable[Iterable[int]]) -> None:
    """Copy rows of bytes, source and target; a pair with a number below 0 is padding."""
    for source, target in pairs:
        if source >= 0 and target >= 0:  # a row that is not there is an IndexError
            ctypes.memmove(targets[target].data_ptr(), sources[source].data_ptr(), sources.shape[1])
