"""gated_activation: activation(gate) * up, the middle of a gated feed-forward layer (Shazeer 2020, "GLU variants
improve transformer"). The kernel computes in float32 and rounds once."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import gated_activation as cpu
from nereid_kernels.launch import run

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_activation(
    gate_up: Tensor, activation: str = "silu", *, deterministic: bool = False, backend: str = "auto"
) -> Tensor:
    """[rows, n] of gate_up's dtype.

    gate_up: [rows, 2 n] float16, bfloat16 or float32, the gate in the first half of a row; rows may be strided.
    activation: "silu", "gelu" (by the error function) or "gelu_tanh" (its approximation by tanh).
    deterministic: a row's bits do not depend on the rows beside it; the kernel's never do.
    Raises ValueError or TypeError, which name the argument.
    """
    check_shapes({}, gate_up=(gate_up, ("rows", "width")))
    check_dtypes(FLOATS, gate_up=gate_up)
    check_contiguous_rows(gate_up=gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: got width {gate_up.shape[1]}; allowed: even widths, gate and up beside each other")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    if pick(check_same_device(gate_up=gate_up), backend) == "cpu":
        return cpu.gated_activation(gate_up, activation, deterministic)
    out: Tensor = _gated_activation(gate_up, activation)
    return out


@torch.library.custom_op("nereid_kernels::gated_activation", mutates_args=())
def _gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    from nereid_kernels.triton_lang.gated_activation import launch_gated_activation

    out = _empty(gate_up)
    run(launch_gated_activation(gate_up, out, activation))
    return out


@_gated_activation.register_fake
def _(gate_up: Tensor, activation: str) -> Tensor:
    return _empty(gate_up)


def _empty(gate_up: Tensor) -> Tensor:
    return torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
