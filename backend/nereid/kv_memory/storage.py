"""KVCacheStorage: the memory behind the blocks. Owns it; knows nothing of requests.

One pool of pages, each a block of whichever group; a page is contiguous over all layers of its group, so that copying,
swapping or storing a block is a single copy, and one (block, head) is one tile. A layer's K and V are strided views;
so are the scales of a quantised cache, which lie in the same page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nereid.kv_memory.groups import KVCacheGroup
from nereid_kernels.native.memory import empty

_ALIGNMENT = 64  # bytes: a cache line, and what the widest loads want


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's view of the pool.

    k, v: [block, kv_head, slot, head_dim], strided over blocks.  group: index of its KV cache group.  window,
    num_sink_tokens: as in BlockGroup.  k_scale, v_scale: [block, kv_head, slot] float32, or int32 of int8, strided over
    blocks; None where the cache is not quantised.
    """

    k: torch.Tensor
    v: torch.Tensor
    group: int
    window: int
    num_sink_tokens: int
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class KVCacheStorage:
    """`num_blocks` pages, the null block included, on `device`."""

    def __init__(self, groups: tuple[KVCacheGroup, ...], num_blocks: int, device: torch.device) -> None:
        # Not filled: a slot is read only after it was written (NOTE: attention masks the rest, NaN or not).
        shape = num_blocks, page_bytes(groups)
        on_cpu = device.type == "cpu"
        self._pages = empty(shape, torch.uint8) if on_cpu else torch.empty(shape, dtype=torch.uint8, device=device)
        self._layers = {
            layer: self._view(groups[index], index, place)
            for index in range(len(groups))
            for place, layer in enumerate(groups[index].layers)
        }

    @property
    def pages(self) -> torch.Tensor:
        """[block, bytes] uint8"""
        return self._pages

    def layer(self, index: int) -> LayerCache:
        """The cache of one of the model's layers."""
        return self._layers[index]

    def first_of_group(self, group: int) -> LayerCache:
        """The cache of a group's first layer, whose shapes and strides all its layers have."""
        return next(cache for cache in self._layers.values() if cache.group == group)

    def _view(self, group: KVCacheGroup, index: int, place: int) -> LayerCache:
        data = self._pages[:, : group.data_bytes].view(group.dtype).view(-1, *group.block_shape)
        k_scale, v_scale = None, None
        if group.is_quantised:
            at = slice(group.scale_bytes.start, group.scale_bytes.stop)
            scales = self._pages[:, at].view(group.scale_dtype).view(-1, *group.scale_shape)
            k_scale, v_scale = scales[:, place, 0], scales[:, place, 1]
        rule = group.rule
        return LayerCache(
            data[:, place, 0], data[:, place, 1], index, rule.window, rule.num_sink_tokens, k_scale, v_scale
        )


def sizes(groups: tuple[KVCacheGroup, ...], plain: tuple[KVCacheGroup, ...]) -> str:
    """For the log: what a token and a block take, and how many times more tokens fit than with the groups `plain`."""
    first, block = groups[0], page_bytes(groups)
    told = f"{first.dtype}, {block * len(groups) / first.block_size:.0f} bytes a token, {block} a block"
    return told if groups == plain else f"{told}; {page_bytes(plain) / block:.2f} times the tokens of {plain[0].dtype}"


def page_bytes(groups: tuple[KVCacheGroup, ...]) -> int:
    """Size of a page: the largest group's block, rounded up so that rows of every group's head_dim start aligned."""
    step = math.lcm(_ALIGNMENT, *(group.head_dim * group.dtype.itemsize for group in groups))
    return -(-max(group.bytes_per_block for group in groups) // step) * step
