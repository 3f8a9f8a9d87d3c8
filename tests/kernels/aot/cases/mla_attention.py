"""Launches of mla_attention, compiled ahead of time: DeepSeek's 512 + 64 with 128 heads, and with a share of 16."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.mla_attention import launch_mla_attention

LATENT, ROPE = 512, 64


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    decode, reduction, prefill = _launches(architecture, heads=16)
    decode_128, _, prefill_128 = _launches(architecture, heads=128)
    return {
        "decode_bf16_16": decode,
        "reduction_bf16_16": reduction,
        "prefill_bf16_16": prefill,
        "decode_bf16_128": decode_128,
        "prefill_bf16_128": prefill_128,
    }


def _launches(architecture: str, heads: int) -> list[Launch]:
    """Of a step with one sequence of 64 query tokens among 4; blocks of 64 slots."""
    query = torch.empty(67, heads, LATENT + ROPE, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(1024, 60, 1, 64, LATENT + ROPE, dtype=torch.bfloat16, device="meta")
    block_tables, cu_query_lens, seq_lens = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((4, 256), (5,), (4,))
    )
    out = torch.empty(67, heads, LATENT, dtype=torch.bfloat16, device="meta")
    decode, *_, reduction, prefill = launch_mla_attention(
        query, pool[:, 1], block_tables, cu_query_lens, seq_lens, out, 64, 0.1, architecture
    )
    return [decode, reduction, prefill]
