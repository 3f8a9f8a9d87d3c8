"""KVCacheGroup: layers whose KV lies in blocks of one shape and is looked back at alike. Each group has a block table
of its own over the one pool.

Where kinds of layers are mixed (full attention and windows), every kind is cut into groups of as many layers as the
rarest kind has, so that all blocks have one size and none strands memory, but for the last group of a kind whose number
of layers is no multiple of that. Plain frozen data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nereid.batch import BlockGroup
from nereid.model_config import ModelConfig
from nereid_kernels.formats import scale_dtype

_SCALE_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """A block of this group is laid out `[layer, k/v, kv_head, slot, head_dim]`, contiguous. Where dtype is a quantised
    one, scales `[layer, k/v, kv_head, slot]` follow in the same block: one for each token and KV head, of int8 with an
    offset.

    layers: indices of the model's layers, in the order of the layout.  rule: which tokens they look back at.
    """

    layers: tuple[int, ...]
    rule: BlockGroup
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (len(self.layers), 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def data_bytes(self) -> int:
        """Of a block's keys and values."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def is_quantised(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def scale_shape(self) -> tuple[int, int, int, int]:
        return self.block_shape[:4]

    @property
    def scale_dtype(self) -> torch.dtype:
        return scale_dtype(self.dtype, by_token=True)

    @property
    def scale_bytes(self) -> range:
        """Where in a block the scales lie; empty where there are none."""
        start = -(-self.data_bytes // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
        size = math.prod(self.scale_shape) * self.scale_dtype.itemsize
        return range(start, start + size if self.is_quantised else start)

    @property
    def bytes_per_block(self) -> int:
        return self.scale_bytes.stop


def groups_of(
    config: ModelConfig, block_size: int, dtype: torch.dtype, num_sink_tokens: int = 0
) -> tuple[KVCacheGroup, ...]:
    """The groups of a model, in the order of its block tables.  num_sink_tokens: of the layers that have a window."""
    kinds: dict[int, list[int]] = {}  # layers by window
    for layer, window in enumerate(config.layer_windows):
        kinds.setdefault(window, []).append(layer)
    size = min(map(len, kinds.values()))
    return tuple(
        KVCacheGroup(
            tuple(layers[start : start + size]),
            BlockGroup(window, num_sink_tokens if window else 0),
            config.num_kv_heads,
            config.head_dim,
            block_size,
            dtype,
        )
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


def num_layers_of_all_kinds(groups: tuple[KVCacheGroup, ...]) -> int:
    """How many of the first layers it takes to meet one of each kind."""
    first: dict[BlockGroup, int] = {}  # layer by what it looks back at
    for group in groups:
        first[group.rule] = min(first.get(group.rule, group.layers[0]), group.layers[0])
    return 1 + max(first.values())
