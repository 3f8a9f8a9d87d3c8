"""Launches of realistic size: what the roofline counts, what is tuned, and what is timed on a GPU.

Always holds: every kernel is started by one of WORKLOADS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.workloads.layers import (
    add_rms_norm,
    copy_blocks,
    gated_activation,
    gather_blocks,
    kv_write,
    matmul,
    matmul_int4,
    matmul_int8,
    mla_attention,
    paged_attention,
    qk_norm_rope_kv_write,
    scatter_blocks,
)
from nereid_kernels.workloads.sampling import (
    apply_bias,
    grammar_mask,
    penalties,
    sample,
    verify_coupled,
    verify_draft,
    verify_tree,
)

Make = Callable[..., Sequence[Launch]]
"""(device, architecture=None) -> the launches of one call; architecture: the device's own, where it is left out."""

WORKLOADS: Mapping[tuple[str, str], partial[Sequence[Launch]]] = MappingProxyType(
    {
        ("rms_norm", "64 x 4096"): partial(add_rms_norm, rows=64, width=4096),
        ("rms_norm", "1024 x 2048"): partial(add_rms_norm, rows=1024, width=2048),
        ("rms_norm", "1024 x 4096"): partial(add_rms_norm, rows=1024, width=4096),
        ("rms_norm", "1024 x 16384"): partial(add_rms_norm, rows=1024, width=16384),
        ("rms_norm", "8192 x 4096"): partial(add_rms_norm, rows=8192, width=4096),
        ("matmul", "64 x 4096 x 14336"): partial(matmul, rows=64),
        ("matmul", "512 x 4096 x 14336"): partial(matmul, rows=512),
        ("matmul", "8192 x 4096 x 14336"): partial(matmul, rows=8192),
        ("quantised_matmul", "int8 64 x 4096 x 14336"): partial(matmul_int8, rows=64),
        ("quantised_matmul", "int8 8192 x 4096 x 14336"): partial(matmul_int8, rows=8192),
        ("quantised_matmul", "int4 64 x 4096 x 14336"): partial(matmul_int4, rows=64),
        ("quantised_matmul", "int4 8192 x 4096 x 14336"): partial(matmul_int4, rows=8192),
        ("gated_activation", "64 x 14336"): partial(gated_activation, rows=64, width=14336),
        ("gated_activation", "8192 x 14336"): partial(gated_activation, rows=8192, width=14336),
        ("kv_write", "64 tokens"): partial(kv_write, tokens=64),
        ("kv_write", "8192 tokens"): partial(kv_write, tokens=8192),
        ("kv_write", "8192 tokens, e4m3"): partial(kv_write, tokens=8192, cache_dtype=torch.float8_e4m3fn),
        ("qk_norm_rope_kv_write", "64 tokens"): partial(qk_norm_rope_kv_write, tokens=64),
        ("qk_norm_rope_kv_write", "8192 tokens"): partial(qk_norm_rope_kv_write, tokens=8192),
        ("paged_attention", "decode 64 x 4096"): partial(paged_attention, seqs=64, query_len=1, seq_len=4096),
        ("paged_attention", "decode 1 x 65536"): partial(paged_attention, seqs=1, query_len=1, seq_len=65536),
        ("paged_attention", "verify 64 x 8, 4096"): partial(paged_attention, seqs=64, query_len=8, seq_len=4096),
        ("paged_attention", "verify 64 x 16, 4096"): partial(paged_attention, seqs=64, query_len=16, seq_len=4096),
        ("paged_attention", "decode 64 x 16384, 4 + 4096"): partial(
            paged_attention, seqs=64, query_len=1, seq_len=16384, window=4096, num_sink_tokens=4
        ),
        ("paged_attention", "prefill 8192"): partial(paged_attention, seqs=1, query_len=8192, seq_len=8192),
        ("mla_attention", "decode 64 x 4096"): partial(mla_attention, seqs=64, query_len=1, seq_len=4096),
        ("mla_attention", "verify 64 x 8, 4096"): partial(mla_attention, seqs=64, query_len=8, seq_len=4096),
        ("mla_attention", "prefill 8192"): partial(mla_attention, seqs=1, query_len=8192, seq_len=8192),
        ("block_ops", "copy 1024 blocks"): partial(copy_blocks, blocks=1024),
        ("block_ops", "gather 1024 blocks"): partial(gather_blocks, blocks=1024),
        ("block_ops", "scatter 1024 blocks"): partial(scatter_blocks, blocks=1024),
        ("sample", "greedy 64"): partial(sample, rows=64, temperature=0.0, top_p=1.0),
        ("sample", "random 64"): partial(sample, rows=64, temperature=1.0, top_p=1.0),
        ("sample", "top_p 64"): partial(sample, rows=64, temperature=1.0, top_p=0.9),
        ("penalties", "64 rows"): partial(penalties, rows=64),
        ("penalties", "bias 64 x 64"): partial(apply_bias, rows=64, entries=64),
        ("grammar_mask", "64 rows"): partial(grammar_mask, rows=64),
        ("verify_draft", "64 x 4"): partial(verify_draft, seqs=64, draft_len=4),
        ("verify_draft", "coupled 64 x 4"): partial(verify_coupled, seqs=64, draft_len=4),
        ("verify_draft", "tree 64 x 15"): partial(verify_tree, seqs=64, nodes=15),
    }
)
"""(operation, shape) -> its launches. Operations have the names of this package's modules."""
