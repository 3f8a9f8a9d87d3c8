"""kv_write: store new keys and values in the slots of a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nereid_kernels.layout import flat_rows, row_index


@dataclass(frozen=True, slots=True)
class KVWritePlan:
    """Where the step's tokens go, worked out once for all layers.

    tokens: which of the step's tokens are stored, [n], or None for all.  rows: head_dim-wide rows of a layer's view,
    [n * kv_heads].
    """

    tokens: torch.Tensor | None
    rows: torch.Tensor


def plan_kv_write(slot_mapping: torch.Tensor, cache: torch.Tensor) -> KVWritePlan:
    """Prepare `kv_write` for one step.

    slot_mapping: [tokens] int64, block id x block size + offset; -1 is padding and is not stored.
    cache: a layer's K or V, [block, kv_head, slot, head_dim]; all layers must have its strides.
    """
    padded = bool((slot_mapping < 0).any())
    tokens = (slot_mapping >= 0).nonzero()[:, 0] if padded else None
    slots = slot_mapping if tokens is None else slot_mapping[tokens]
    block_size = cache.shape[2]
    rows = row_index(cache, slots // block_size, slots % block_size)  # [n, kv_heads]
    return KVWritePlan(tokens, rows.reshape(-1))


def kv_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: KVWritePlan
) -> None:
    """Store key and value, each [tokens, kv_heads, head_dim], in place in k_cache and v_cache.

    The caches are a layer's views, [block, kv_head, slot, head_dim].
    """
    head_dim = key.shape[-1]
    for new, cache in ((key, k_cache), (value, v_cache)):
        kept = new if plan.tokens is None else new[plan.tokens]
        flat_rows(cache).index_copy_(0, plan.rows, kept.reshape(-1, head_dim))
