"""How a layer's view of the paged pool is addressed as one matrix of head_dim-wide rows. Pure functions.

The view is [block, kv_head, slot, head_dim], strided over blocks, contiguous within (kv_head, slot, head_dim). The
scales of tokens are one as well, with a head_dim of 1.
"""

from __future__ import annotations

import torch


def flat_rows(cache: torch.Tensor) -> torch.Tensor:
    """The memory from the view's first element to its last as [rows, head_dim], without a copy."""
    num_blocks, num_heads, block_size, head_dim = cache.shape
    rows = (num_blocks - 1) * (cache.stride(0) // head_dim) + num_heads * block_size
    return cache.as_strided((rows, head_dim), (head_dim, 1))


def row_index(cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of `flat_rows(cache)` for slots (block, offset), each [n] int64: [n, kv_heads].

    Raises ValueError where the view is not laid out as this module says.
    """
    _, num_heads, block_size, head_dim = cache.shape
    if cache.stride()[1:] != (block_size * head_dim, head_dim, 1) or cache.stride(0) % head_dim:
        raise ValueError(f"cache strides {cache.stride()} are not those of a block-major pool")
    heads = torch.arange(num_heads, device=blocks.device) * block_size
    return (blocks * (cache.stride(0) // head_dim) + offsets)[:, None] + heads
