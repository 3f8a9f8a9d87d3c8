"""grammar_mask: tokens that a grammar forbids get a logit of -inf, in place.

The bitmask has the layout of xgrammar and llguidance: bit t % 32 of word t // 32 is set where token t is allowed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import grammar_mask as cpu
from nereid_kernels.launch import run


def grammar_mask(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None = None, *, backend: str = "auto") -> None:
    """Change logits in place.

    logits: [rows, vocab] float32; rows may be strided.  bitmask: [masks, ceil(vocab / 32)] int32; bits past the
    vocabulary are ignored.  row_indices: [masks] int32 or int64, the row of logits that each mask is for, all
    different; a negative one is for none, so that a batch can be padded. Without it mask i is for row i, and there are
    as many as rows.  Raises ValueError or TypeError, which name the argument.
    """
    sizes: dict[str, int] = {}
    check_shapes(sizes, logits=(logits, ("rows", "vocab")))
    masks = "rows" if row_indices is None else "masks"
    check_shapes(sizes, bitmask=(bitmask, (masks, (sizes["vocab"] + 31) // 32)))
    check_dtypes((torch.float32,), logits=logits)
    check_dtypes((torch.int32,), bitmask=bitmask)
    check_contiguous_rows(logits=logits, bitmask=bitmask)
    device = check_same_device(logits=logits, bitmask=bitmask)
    if row_indices is not None:
        check_shapes(sizes, row_indices=(row_indices, (masks,)))
        check_dtypes((torch.int32, torch.int64), row_indices=row_indices)
        check_contiguous_rows(row_indices=row_indices)
        check_same_device(logits=logits, row_indices=row_indices)
    if pick(device, backend) == "cpu":
        cpu.grammar_mask(logits, bitmask, row_indices)
    else:
        _grammar_mask(logits, bitmask, row_indices)


@torch.library.custom_op("nereid_kernels::grammar_mask", mutates_args=("logits",))
def _grammar_mask(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None) -> None:
    from nereid_kernels.triton_lang.grammar_mask import launch_grammar_mask

    run(launch_grammar_mask(logits, bitmask, row_indices))


@_grammar_mask.register_fake
def _(logits: Tensor, bitmask: Tensor, row_indices: Tensor | None) -> None:
    return None
