"""The kernel of grammar_mask: one program a tile of a mask. Logits are only written, and only where forbidden."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose


@triton.jit
def _grammar_mask(
    logits_ptr: tl.tensor,  # [rows, vocab]
    bitmask_ptr: tl.tensor,  # [masks, ceil(vocab / 32)]
    row_indices_ptr: tl.tensor,  # [masks], or None
    logits_stride: tl.tensor,
    bitmask_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    mask_index = tl.program_id(0).to(tl.int64)
    row = mask_index
    if row_indices_ptr is not None:
        row = tl.load(row_indices_ptr + mask_index).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (tokens < vocab) & (row >= 0)
    words = tl.load(bitmask_ptr + mask_index * bitmask_stride + tokens // 32, mask=inside, other=0)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    banned = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * logits_stride + tokens, banned, mask=inside & forbidden)


def launch_grammar_mask(
    logits: Tensor, bitmask: Tensor, row_indices: Tensor | None, architecture: str | None = None
) -> Launch:
    """logits: [rows, vocab].  bitmask: [masks, words].  row_indices: [masks], or None."""
    vocab = logits.shape[1]
    config = choose("grammar_mask", architecture or architecture_of(logits.device), size=vocab)
    arguments = {
        "logits_ptr": logits,
        "bitmask_ptr": bitmask,
        "row_indices_ptr": row_indices,
        "logits_stride": logits.stride(0),
        "bitmask_stride": bitmask.stride(0),
        "vocab": vocab,
        **config.tiles,
    }
    grid = (bitmask.shape[0], triton.cdiv(vocab, config.tiles["BLOCK"]))
    return Launch(_grammar_mask, grid, arguments, config.num_warps, config.num_stages)
