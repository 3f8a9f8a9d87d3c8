"""copy_blocks, gather_blocks and scatter_blocks by their definition."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """pool: [blocks, ...].  pairs: [n, 2], source and destination."""
    for source, destination in pairs.tolist():
        if source >= 0 and destination >= 0:
            pool[destination] = pool[source]


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """out: [n, ...]; row i becomes block block_ids[i]."""
    for row, block in enumerate(block_ids.tolist()):
        if block >= 0:
            out[row] = pool[block]


def scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor) -> None:
    """source: [n, ...]; block block_ids[i] becomes row i."""
    for row, block in enumerate(block_ids.tolist()):
        if block >= 0:
            pool[block] = source[row]
