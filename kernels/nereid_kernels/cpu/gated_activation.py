"""gated_activation on the CPU.

PyTorch computes an activation in vectors, and what is left over at the end of a row by other code, with other bits. So
a row's bits depend on where the row ends, which they may, and on where a thread's share of the tensor ends, which may
be anywhere within a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SERIAL = 16384  # elements that PyTorch leaves to one thread, whatever the activation


def gated_activation(gate_up: Tensor, activation: str, deterministic: bool) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if not deterministic:
        return _activate(gate, activation) * up
    rows = max(_SERIAL // max(gate.shape[1], 1), 1)  # a row that is wider is shared out in the same way each time
    return torch.cat([_activate_strided(part, activation) for part in torch.split(gate, rows)]) * up


def _activate_strided(gate: Tensor, activation: str) -> Tensor:
    """A row by itself is contiguous, and PyTorch may have other code for what is: it is computed as one of two."""
    return _activate(gate, activation) if len(gate) != 1 else _activate(gate.expand(2, -1), activation)[:1]


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
