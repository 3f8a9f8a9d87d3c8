"""From products of queries and keys to the logits of a softmax: soft cap, masks, ALiBi."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def base2_logits(
    s: tl.tensor,  # [M, TILE], scaled products
    key_positions: tl.tensor,  # [TILE]
    query_positions: tl.tensor,  # [M]
    end: tl.tensor,
    context_len: tl.tensor,
    soft_cap: tl.tensor,
    slopes: tl.tensor,  # [M], with ALIBI
    ancestors: tl.tensor,  # [M], with TREE
    draft_positions: tl.tensor,  # [TILE], with TREE
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Base-2 logits, [M, TILE]; -inf where a query does not see a key."""
    if SOFT_CAP:  # soft_cap * tanh(s / soft_cap)
        s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E / soft_cap))))
    seen = (key_positions < end)[None, :]
    at = key_positions
    if TREE:  # a draft token sees the context, and of the draft tokens its ancestors and itself
        draft = key_positions - context_len
        bit = (ancestors[:, None] >> tl.maximum(draft, 0)[None, :].to(tl.int64)) & 1
        seen = seen & ((draft < 0)[None, :] | (bit != 0))
        at = tl.where(draft < 0, key_positions, draft_positions)
    else:
        seen = seen & (at[None, :] <= query_positions[:, None])
    if WINDOW > 0:
        seen = seen & (query_positions[:, None] - at[None, :] < WINDOW)
    if ALIBI:
        s += slopes[:, None] * (at[None, :] - query_positions[:, None])
    return tl.where(seen, s * LOG2E, float("-inf"))
