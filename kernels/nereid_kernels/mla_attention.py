"""mla_attention: causal multi-head latent attention over a paged latent cache, in absorbed form.

DeepSeek-V2, arXiv 2405.04434, equations 9 to 19: a token's cache row is its compressed latent c followed by its rotary
key, shared by all heads. The up-projections of key and value are folded into the query and the output (section 2.1.2),
so that a head's score is q_latent . c + q_rope . k_rope, and its result is a weighted sum of the latents themselves.
Prefill, chunk, decode and verification differ by query length alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import mla_attention as cpu
from nereid_kernels.launch import run


def mla_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    latent_dim: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """[tokens, heads, latent_dim] of the query's dtype, softmax and sums in float32.

    query: [tokens, heads, latent + rope] float16, bfloat16 or float32: the absorbed query, then its rotary part.
    cache: a layer's view of the pool, [block, 1, slot, latent + rope] of the query's dtype, strided over blocks; the
    step's own tokens are written already.
    block_tables: [seqs, max_blocks] int32; entries past a sequence's end are not looked at.
    cu_query_lens: [seqs + 1] int32, sums of the query lengths from 0 on.  seq_lens: [seqs] int32, the query included:
    query token i of a sequence sits at position seq_len - query_len + i.
    max_query_len: at least the longest query's length; a greater one costs idle programs, never correctness.
    scale: what scores are multiplied by before the softmax.  latent_dim: how much of a row is latent.

    A query token that sees no key gets zeros. Query tokens past the last sequence's are padding; what the result holds
    there is undefined. Raises ValueError or TypeError, which name the argument.
    """
    device = _check(query, cache, block_tables, cu_query_lens, seq_lens, max_query_len, latent_dim)
    if pick(device, backend) == "cpu":
        return cpu.mla_attention(query, cache, block_tables, cu_query_lens, seq_lens, scale, latent_dim)
    out: Tensor = _mla_attention(query, cache, block_tables, cu_query_lens, seq_lens, max_query_len, scale, latent_dim)
    return out


def _check(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    latent_dim: int,
) -> torch.device:
    sizes: dict[str, int] = {}
    check_shapes(
        sizes,
        query=(query, ("tokens", "heads", "width")),
        cache=(cache, ("blocks", 1, "slots", "width")),
        seq_lens=(seq_lens, ("seqs",)),
        block_tables=(block_tables, ("seqs", "max_blocks")),
    )
    check_shapes({}, cu_query_lens=(cu_query_lens, (sizes["seqs"] + 1,)))
    if not 0 < latent_dim < query.shape[2]:
        raise ValueError(f"latent_dim: got {latent_dim}; allowed: 1 to {query.shape[2] - 1}, the rest is rotary")
    if max_query_len < 0:
        raise ValueError(f"max_query_len: got {max_query_len}; allowed: 0 and more")
    check_dtypes(FLOATS, query=query)
    check_dtypes((query.dtype,), cache=cache)
    check_dtypes((torch.int32,), block_tables=block_tables, cu_query_lens=cu_query_lens, seq_lens=seq_lens)
    check_contiguous_rows(
        query=query, cache=cache, block_tables=block_tables, cu_query_lens=cu_query_lens, seq_lens=seq_lens
    )
    return check_same_device(
        query=query, cache=cache, block_tables=block_tables, cu_query_lens=cu_query_lens, seq_lens=seq_lens
    )


@torch.library.custom_op("nereid_kernels::mla_attention", mutates_args=())
def _mla_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    latent_dim: int,
) -> Tensor:
    from nereid_kernels.triton_lang.mla_attention import launch_mla_attention

    out = _empty(query, latent_dim)
    for launch in launch_mla_attention(query, cache, block_tables, cu_query_lens, seq_lens, out, max_query_len, scale):
        run(launch)
    return out


@_mla_attention.register_fake
def _(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    latent_dim: int,
) -> Tensor:
    return _empty(query, latent_dim)


def _empty(query: Tensor, latent_dim: int) -> Tensor:
    return torch.empty(*query.shape[:2], latent_dim, dtype=query.dtype, device=query.device)
