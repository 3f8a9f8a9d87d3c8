"""copy_blocks, gather_blocks and scatter_blocks on the CPU, on the bytes of each block."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    sources, destinations = pairs[(pairs >= 0).all(dim=1)].unbind(dim=1)
    blocks = as_bytes(pool)
    blocks.index_copy_(0, destinations, blocks.index_select(0, sources))


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    kept = (block_ids >= 0).nonzero()[:, 0]
    as_bytes(out).index_copy_(0, kept, as_bytes(pool).index_select(0, block_ids[kept]))


def scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor) -> None:
    kept = (block_ids >= 0).nonzero()[:, 0]
    as_bytes(pool).index_copy_(0, block_ids[kept], as_bytes(source).index_select(0, kept))


def as_bytes(blocks: Tensor) -> Tensor:
    """[blocks, bytes of a block] uint8, the same memory. Each block of `blocks` is contiguous."""
    width = blocks.shape[1:].numel()
    return blocks.as_strided((blocks.shape[0], width), (blocks.stride(0), 1)).view(torch.uint8)
