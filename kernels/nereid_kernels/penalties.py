"""penalties: what a request asks to be changed in its logits before sampling, in place and in this order.

1. repetition (Keskar et al. 2019, CTRL, in the form of Hugging Face's processor): the logit of a token that occurs in
   the prompt or the output is divided by the penalty where it is positive, and multiplied with it otherwise;
2. frequency and presence (OpenAI): minus frequency * count, minus presence where count > 0, counts of the output alone;
3. bias: a number is added to each listed token's logit; -inf bans the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import penalties as cpu
from nereid_kernels.launch import run

_F32, _I32 = (torch.float32,), (torch.int32,)


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Steps 1 and 2 on logits [rows, vocab] float32, in place; rows may be strided.

    output_counts: [rows, vocab] int32, how often each token was generated.  prompt_mask: [rows, vocab] bool, which
    tokens the prompt has.  repetition, frequency, presence: [rows] float32; 1, 0 and 0 change nothing, and such a row
    is not read.  Raises ValueError or TypeError, which name the argument.
    """
    matrices = {"output_counts": output_counts, "prompt_mask": prompt_mask}
    scales = {"repetition": repetition, "frequency": frequency, "presence": presence}
    sizes: dict[str, int] = {}
    check_shapes(sizes, logits=(logits, ("rows", "vocab")))
    check_shapes(sizes, **{name: (tensor, ("rows", "vocab")) for name, tensor in matrices.items()})
    check_shapes(sizes, **{name: (tensor, ("rows",)) for name, tensor in scales.items()})
    check_dtypes(_F32, logits=logits, **scales)
    check_dtypes(_I32, output_counts=output_counts)
    check_dtypes((torch.bool,), prompt_mask=prompt_mask)
    check_contiguous_rows(logits=logits, **matrices, **scales)
    device = check_same_device(logits=logits, **matrices, **scales)
    run_on = cpu.apply_penalties if pick(device, backend) == "cpu" else _apply_penalties
    run_on(logits, output_counts, prompt_mask, repetition, frequency, presence)


def apply_bias(
    logits: Tensor, bias_rows: Tensor, bias_ids: Tensor, bias_values: Tensor, *, backend: str = "auto"
) -> None:
    """Step 3 on logits [rows, vocab] float32, in place; rows may be strided.

    bias_rows: [rows + 1] int32; row r's entries are bias_rows[r] to bias_rows[r + 1] of the two lists.
    bias_ids: [entries] int32, token ids.  bias_values: [entries] float32; a token listed twice gets both.
    Raises ValueError or TypeError, which name the argument.
    """
    sizes: dict[str, int] = {}
    check_shapes(sizes, logits=(logits, ("rows", "vocab")))
    check_shapes(sizes, bias_rows=(bias_rows, (sizes["rows"] + 1,)))
    check_shapes(sizes, bias_ids=(bias_ids, ("entries",)), bias_values=(bias_values, ("entries",)))
    check_dtypes(_F32, logits=logits, bias_values=bias_values)
    check_dtypes(_I32, bias_rows=bias_rows, bias_ids=bias_ids)
    tensors = {"logits": logits, "bias_rows": bias_rows, "bias_ids": bias_ids, "bias_values": bias_values}
    check_contiguous_rows(**tensors)
    run_on = cpu.apply_bias if pick(check_same_device(**tensors), backend) == "cpu" else _apply_bias
    run_on(logits, bias_rows, bias_ids, bias_values)


@torch.library.custom_op("nereid_kernels::apply_penalties", mutates_args=("logits",))
def _apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    from nereid_kernels.triton_lang.penalties import launch_penalties

    run(launch_penalties(logits, output_counts, prompt_mask, repetition, frequency, presence))


@_apply_penalties.register_fake
def _(*_: Tensor) -> None:
    return None


@torch.library.custom_op("nereid_kernels::apply_bias", mutates_args=("logits",))
def _apply_bias(logits: Tensor, bias_rows: Tensor, bias_ids: Tensor, bias_values: Tensor) -> None:
    from nereid_kernels.triton_lang.penalties import launch_bias

    run(launch_bias(logits, bias_rows, bias_ids, bias_values))


@_apply_bias.register_fake
def _(*_: Tensor) -> None:
    return None
