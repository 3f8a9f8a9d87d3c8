"""Family: what an architecture's definition offers, whoever computes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from nereid.models.operations import Operations

W_co = TypeVar("W_co", covariant=True)


class Family(Protocol[W_co]):
    """A model's weights, and the order of its operations. Changes nothing."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def head(self) -> W_co:
        """The product that makes logits of hidden states."""
        ...

    def product_weights(self) -> Iterable[W_co]:
        """One of each shape that products are made with."""
        ...

    def hidden_states(self, ops: Operations[Any, W_co], num_layers: int | None = None) -> Any:
        """Of the rows that the step asks for, after the last norm. num_layers: only so many layers are computed."""
        ...
