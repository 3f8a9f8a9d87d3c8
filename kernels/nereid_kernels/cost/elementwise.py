"""Formulas of kernels that multiply no matrices and whose work follows from shapes.

They hold where no token, block or row is passed over: each token has a slot, each copy differs from the others, each
row is penalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereid_kernels.cost.cost import Cost


def gated_activation(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    out = grid[0] * a["WIDTH"] * a["out_ptr"].element_size()
    return Cost(2 * out, out, 3 * out)


def copy_blocks(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    copied = grid[0] * a["WORDS"] * a["source_ptr"].element_size()
    return Cost(copied, copied, 2 * copied)


def penalties(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    rows, tiles = grid
    logits = rows * a["vocab"] * a["logits_ptr"].element_size()
    loaded = logits + rows * a["vocab"] * (a["counts_ptr"].element_size() + a["prompt_ptr"].element_size())
    parameters = 3 * 4  # bytes of a row's; each of its programs loads them
    return Cost(loaded + rows * tiles * parameters, logits, loaded + rows * parameters + logits)


def kv_write(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    tokens = grid[0]
    loaded = 2 * tokens * a["KV_HEADS"] * a["HEAD_DIM"] * a["key_ptr"].element_size()
    return Cost(loaded=loaded, distinct=loaded) + _cache(a, tokens)


def qk_norm_rope_kv_write(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    tokens, heads, kv_heads, width, rotary = grid[0], a["HEADS"], a["KV_HEADS"], a["HEAD_DIM"], a["ROTARY_DIM"]
    size, query_programs = a["qkv_ptr"].element_size(), -(-heads // a["BLOCK_HEADS"])
    qkv, query = tokens * (heads + 2 * kv_heads) * width * size, tokens * heads * width * size
    partners = tokens * (heads + kv_heads) * rotary * size  # loaded a second time, to be rotated
    angles = 2 * rotary * a["cos_sin_ptr"].element_size()
    weights = {name: width * a[name].element_size() for name in ("q_weight_ptr", "k_weight_ptr") if a[name] is not None}
    loaded = qkv + partners + tokens * grid[1] * angles
    for name, weight in weights.items():
        programs = query_programs if name == "q_weight_ptr" else grid[1] - query_programs
        loaded += tokens * programs * (weight + weight * rotary // width)
    distinct = qkv + tokens * angles + min(tokens, 1) * sum(weights.values())
    return Cost(loaded, query, distinct + query) + _cache(a, tokens)


def _cache(a: Mapping[str, Any], tokens: int) -> Cost:
    """Of keys and values that are stored: themselves, and their scales, loaded or stored."""
    heads = tokens * a["KV_HEADS"]
    stored = 2 * heads * a["HEAD_DIM"] * a["k_cache_ptr"].element_size()
    if a["SCALES"] == "token":
        return Cost(stored=stored + 8 * heads, distinct=stored + 8 * heads)
    scales = {"tensor": 8, "head": 8 * a["KV_HEADS"]}.get(a["SCALES"], 0)
    return Cost(8 * heads if scales else 0, stored, stored + min(tokens, 1) * scales)
