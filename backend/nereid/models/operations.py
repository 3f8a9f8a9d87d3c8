"""Operations: what a model family is written in, so that one definition is computed at once or recorded.

A family says which operations follow one another; `eager` computes each with PyTorch or the Triton-lang kernels as it
comes, `recorded` keeps them as a program of the native library. X is what is handed on: a tensor, or a place for one.
W is a product's weight, in whatever order its implementation reads it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

X = TypeVar("X")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
W_contra = TypeVar("W_contra", contravariant=True)


class Weights(Protocol[W_co]):
    """How weights of products are kept."""

    def keep(self, weight: Tensor) -> W_co:
        """weight: [out, in]."""
        ...

    def keep_head(self, weight: Tensor) -> W_co:
        """The same, of what makes logits."""
        ...

    def keep_gated(self, gate: Tensor, up: Tensor) -> W_co:
        """gate, up: [out, in] each, of one product: see `Operations.gated_silu`."""
        ...


class Operations(Protocol[X, W_contra]):
    """One step's. Rows are the step's tokens, until `hidden_rows`."""

    def embed(self, table: Tensor) -> X:
        """[tokens, width]: rows of [vocabulary, width]."""
        ...

    def hidden_rows(self, x: X) -> X:
        """The rows that the step asks for."""
        ...

    def rms_norm(self, x: X, weight: Tensor, eps: float) -> X: ...

    def add_rms_norm(self, x: X, residual: X, weight: Tensor, eps: float) -> tuple[X, X]:
        """(norm of the sum, the sum)."""
        ...

    def linear(self, x: X, weight: W_contra) -> X: ...

    def gated_silu(self, x: X, weight: W_contra) -> X:
        """silu(x times gate) * (x times up)."""
        ...

    def attend(self, qkv: X, rotary: Tensor, layer: int, scale: float) -> X:
        """Turn queries and keys by their positions, store keys and values in a layer's cache, attend.

        rotary: [positions, 2, rotary_dim].  Returns [tokens, heads * head_dim].
        """
        ...
