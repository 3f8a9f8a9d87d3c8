"""gated_activation by its definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up: [rows, 2 n].  Returns [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _activate(gate, activation) * up


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
