"""The kernels of penalties: one program a tile of a row for the penalties, one program a row for the bias."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose


@triton.jit
def _penalties(
    logits_ptr: tl.tensor,  # [rows, vocab]
    counts_ptr: tl.tensor,  # [rows, vocab]
    prompt_ptr: tl.tensor,  # [rows, vocab]
    repetition_ptr: tl.tensor,  # [rows]
    frequency_ptr: tl.tensor,  # [rows]
    presence_ptr: tl.tensor,  # [rows]
    logits_stride: tl.tensor,
    counts_stride: tl.tensor,
    prompt_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab
    logits_ptrs = logits_ptr + row * logits_stride + tokens
    logits = tl.load(logits_ptrs, mask=mask, other=0.0)
    counts = tl.load(counts_ptr + row * counts_stride + tokens, mask=mask, other=0)
    in_prompt = tl.load(prompt_ptr + row * prompt_stride + tokens, mask=mask, other=0) != 0
    factor = tl.where(in_prompt | (counts > 0), repetition, 1.0)
    logits = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
    logits -= frequency * counts.to(tl.float32)
    logits -= tl.where(counts > 0, presence, 0.0)
    tl.store(logits_ptrs, logits, mask=mask)


@triton.jit
def _bias(
    logits_ptr: tl.tensor,  # [rows, vocab]
    bias_rows_ptr: tl.tensor,  # [rows + 1]
    bias_ids_ptr: tl.tensor,  # [entries]
    bias_values_ptr: tl.tensor,  # [entries]
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(bias_rows_ptr + row)
    last = tl.load(bias_rows_ptr + row + 1)
    for start in range(first, last, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        mask = entries < last
        ids = tl.load(bias_ids_ptr + entries, mask=mask, other=0)
        values = tl.load(bias_values_ptr + entries, mask=mask, other=0.0)
        # Atomic, since a token may be listed twice: biased by the client and banned by the engine.
        tl.atomic_add(logits_ptr + row * logits_stride + ids, values, mask=mask, sem="relaxed")


def launch_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    architecture: str | None = None,
) -> Launch:
    """logits, output_counts, prompt_mask: [rows, vocab].  repetition, frequency, presence: [rows]."""
    rows, vocab = logits.shape
    config = choose("penalties", architecture or architecture_of(logits.device), size=vocab)
    arguments = {
        "logits_ptr": logits,
        "counts_ptr": output_counts,
        "prompt_ptr": prompt_mask,
        "repetition_ptr": repetition,
        "frequency_ptr": frequency,
        "presence_ptr": presence,
        "logits_stride": logits.stride(0),
        "counts_stride": output_counts.stride(0),
        "prompt_stride": prompt_mask.stride(0),
        "vocab": vocab,
        **config.tiles,
    }
    grid = (rows, triton.cdiv(vocab, config.tiles["BLOCK"]))
    return Launch(_penalties, grid, arguments, config.num_warps, config.num_stages)


def launch_bias(
    logits: Tensor, bias_rows: Tensor, bias_ids: Tensor, bias_values: Tensor, architecture: str | None = None
) -> Launch:
    """logits: [rows, vocab].  bias_rows: [rows + 1].  bias_ids, bias_values: [entries]."""
    config = choose("bias", architecture or architecture_of(logits.device))
    arguments = {
        "logits_ptr": logits,
        "bias_rows_ptr": bias_rows,
        "bias_ids_ptr": bias_ids,
        "bias_values_ptr": bias_values,
        "logits_stride": logits.stride(0),
        **config.tiles,
    }
    return Launch(_bias, (logits.shape[0],), arguments, config.num_warps, config.num_stages)
