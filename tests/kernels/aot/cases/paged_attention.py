"""Launches of paged_attention that are compiled ahead of time: a Llama-3.1-8B-like model's, and variants of them."""

from __future__ import annotations

from typing import Any

import torch

from nereid_kernels.formats import scale_dtype
from nereid_kernels.launch import Launch
from nereid_kernels.splitting import SPLIT_QUERY
from nereid_kernels.triton_lang.paged_attention import Operands, launch_paged_attention
from tests.kernels.aot.cases import FULLY, pick

_SEQS, _BLOCKS = 16, 4096


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    decode = attention(architecture, 1)
    found = {
        "decode_bf16_d128_g4": pick(decode, "paged_attention"),
        "reduce_d128": pick(decode, "paged_attention_reduce"),
        "verify_bf16_d128_g4": short(architecture, 8),
        "prefill_bf16_d128_g4": long(architecture),
        "prefill_bf16_d256_g2": long(architecture, heads=16, head_dim=256),
        "decode_e4m3_d128_g4": short(architecture, 1, cache_dtype=torch.float8_e4m3fn),
    }
    if architecture in ("sm_80", *FULLY):
        found["decode_e5m2_d128_g4"] = short(architecture, 1, cache_dtype=torch.float8_e5m2)
        found["prefill_bf16_d128_g4_window"] = long(architecture, window=4096)
    return found | _variants(architecture) if architecture in FULLY else found


def _variants(architecture: str) -> dict[str, Launch]:
    small: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 64}
    sink_tokens: dict[str, Any] = {"window": 4096, "num_sink_tokens": 4}
    return {
        "decode_bf16_d256_g2_window_cap": short(architecture, 1, heads=16, head_dim=256, window=4096, soft_cap=50.0),
        "decode_bf16_d128_g4_sink_tokens": short(architecture, 1, **sink_tokens),
        "prefill_bf16_d128_g4_sink_tokens": long(architecture, **sink_tokens),
        "decode_int8_d128_g4": short(architecture, 1, cache_dtype=torch.int8, per_token=True),
        "decode_bf16_d128_g8_sinks_block128": short(architecture, 1, heads=64, sinks=True, block_size=128),
        "decode_bf16_d80_g4": short(architecture, 1, head_dim=80),
        "decode_bf16_d192_g4": short(architecture, 1, head_dim=192),
        "tree_bf16_d128_g4": short(architecture, 16, tree=True),
        "prefill_bf16_d64_g3": long(architecture, **small),
        "prefill_fp32_d64_g3": long(architecture, dtype=torch.float32, **small),
        **{f"prefill_bf16_d{width}_g4": long(architecture, head_dim=width) for width in (80, 96, 192)},
    }


def short(architecture: str, query_len: int, **options: Any) -> Launch:
    return pick(attention(architecture, query_len, **options), "paged_attention", SHORT=True)


def long(architecture: str, **options: Any) -> Launch:
    return pick(attention(architecture, 512, **options), "paged_attention", SHORT=False)


def attention(
    architecture: str,
    query_len: int,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    per_token: bool = False,
    window: int = 0,
    num_sink_tokens: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    tree: bool = False,
) -> list[Launch]:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    pool = meta(_BLOCKS, 32, 2, kv_heads, block_size, head_dim, dtype=cache_dtype or dtype)
    tokens = _SEQS * query_len
    query = meta(tokens, heads, head_dim, dtype=dtype)
    scale_shape = (_BLOCKS, kv_heads, block_size) if per_token else (1,)
    scale = meta(*scale_shape, dtype=scale_dtype(cache_dtype, by_token=per_token)) if cache_dtype else None
    operands = Operands(
        query,
        pool[:, 1, 0],
        pool[:, 1, 1],
        torch.empty_like(query),
        meta(_SEQS, 512),
        meta(_SEQS + 1),
        meta(_SEQS),
        scale,
        scale,
        meta(heads, dtype=torch.float32) if sinks else None,
        None,
        meta(tokens, dtype=torch.int64) if tree else None,
        meta(tokens) if tree else None,
    )
    longest = (query_len, 0) if query_len <= SPLIT_QUERY else (0, query_len)
    return launch_paged_attention(operands, *longest, head_dim**-0.5, window, num_sink_tokens, soft_cap, architecture)
