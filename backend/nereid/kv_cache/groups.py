"""KVCacheGroup: a kind of layer whose KV lives in blocks of one shape, with a block table of its own over the one pool.

A model has one group for each kind of layer (full attention only, today). Plain frozen data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nereid.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """A block of this group is laid out `[layer, k/v, kv_head, slot, head_dim]`, contiguous."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        elements = 1
        for size in self.block_shape:
            elements *= size
        return elements * self.dtype.itemsize


def groups_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[KVCacheGroup, ...]:
    """The groups of a model, in the order of its block tables."""
    full = KVCacheGroup("full", config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    return (full,)
