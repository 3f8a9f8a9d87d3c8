"""KVCacheStorage: the tensors behind the blocks. Owns the memory; knows nothing of requests.

Layout `[block, layer, k/v, kv_head, slot, head_dim]`: a block is contiguous over all layers, so that copying, swapping
or storing one is a single copy, and one (block, head) is one tile. A layer's K and V are strided views.
"""

from __future__ import annotations

import torch

from nereid.kv_cache.groups import KVCacheGroup


class KVCacheStorage:
    """One pool of `num_blocks` pages, the null block included, on `device`."""

    def __init__(self, group: KVCacheGroup, num_blocks: int, device: torch.device) -> None:
        # Not filled: a slot is read only after it was written (NOTE: attention masks the rest, NaN or not).
        self._pool = torch.empty((num_blocks, *group.block_shape), dtype=group.dtype, device=device)

    @property
    def pool(self) -> torch.Tensor:
        """[block, layer, k/v, kv_head, slot, head_dim]"""
        return self._pool

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer: strided views [block, kv_head, slot, head_dim]."""
        return self._pool[:, index, 0], self._pool[:, index, 1]
