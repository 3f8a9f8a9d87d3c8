"""Launches of mla_attention, compiled ahead of time: DeepSeek's 512 + 64 with 128 heads, and with a share of 16."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.mla_attention import launch_mla_attention
from tests.kernels.aot.cases import pick

LATENT, ROPE = 512, 64


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    a_few, all_heads = (_launches(architecture, heads) for heads in (16, 128))
    return {
        "decode_bf16_16": pick(a_few, "mla_attention", SHORT=True),
        "reduction_bf16_16": pick(a_few, "mla_attention_reduction"),
        "decode_bf16_128": pick(all_heads, "mla_attention", SHORT=True),
        "prefill_bf16_128": pick(all_heads, "mla_attention", SHORT=False),
    }


def _launches(architecture: str, heads: int) -> list[Launch]:
    """Of a step with one sequence of 64 query tokens among 4; blocks of 64 slots."""
    query = torch.empty(67, heads, LATENT + ROPE, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(1024, 60, 1, 64, LATENT + ROPE, dtype=torch.bfloat16, device="meta")
    block_tables, cu_query_lens, seq_lens = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((4, 256), (5,), (4,))
    )
    out = torch.empty(67, heads, LATENT, dtype=torch.bfloat16, device="meta")
    return launch_mla_attention(query, pool[:, 1], block_tables, cu_query_lens, seq_lens, out, 64, 0.1, architecture)
