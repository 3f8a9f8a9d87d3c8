"""Layers that the model families share: plain functions and frozen bundles of weights. No state, no requests."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rotary_table(head_dim: int, theta: float, num_positions: int) -> torch.Tensor:
    """cos and sin of every position, [positions, 2, head_dim] float32 (RoFormer, Su et al. 2021).

    Both halves of head_dim hold the same angles, as in Llama's "rotate half" order.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by cos_sin [tokens, 2, head_dim] of x's dtype."""
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]  # [tokens, 1, head_dim]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate_up [tokens, 2 * n] holds both (GLU variants, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
