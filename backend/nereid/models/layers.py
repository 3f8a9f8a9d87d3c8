"""What the model families share: how a layer's operations are run, and tables that are made once. No requests.

Kernels says for all operations of a model which implementation runs them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nereid.errors import ConfigError
from nereid_kernels.cpu.matmul import row_tiles
from nereid_kernels.gated_activation import gated_activation
from nereid_kernels.matmul import matmul
from nereid_kernels.rms_norm import add_rms_norm, rms_norm


class Kernels:
    """backend: of `nereid_kernels.backends`.  deterministic: rows do not depend on each other."""

    def __init__(self, backend: str = "auto", *, deterministic: bool = False) -> None:
        self.backend = backend
        self.deterministic = deterministic
        self._row_tiles: dict[tuple[int, ...], tuple[int, ...]] = {}  # by a weight's shape

    def prepare_products(self, *weights: Tensor) -> None:
        """Where `deterministic` is set: find out in which tiles products by such weights [out, in] can be made. Raises
        ConfigError where a row depends on its place even so, since no library promises that it does not."""
        for weight in weights if self.deterministic else ():
            self._row_tiles[weight.shape] = tiles = row_tiles(weight)
            if not tiles:
                raise ConfigError("deterministic: got true; allowed on this processor: false (its products vary)")

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, in] times weight [out, in]: [rows, out]."""
        if not self.deterministic:
            return functional.linear(x, weight)
        return matmul(x, weight, cpu_tiles=self._row_tiles[weight.shape], backend=self.backend)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, backend=self.backend)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        return add_rms_norm(x, residual, weight, eps, backend=self.backend)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, where gate_up [rows, 2 * n] holds both."""
        return gated_activation(gate_up, "silu", deterministic=self.deterministic, backend=self.backend)


def rotary_table(head_dim: int, theta: float, num_positions: int) -> Tensor:
    """cos and sin of every position, [positions, 2, head_dim] float32 (RoFormer, Su et al. 2021).

    Both halves of head_dim hold the same angles, as in Llama's "rotate half" order.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)
