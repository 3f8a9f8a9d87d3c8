"""Checks of a wrapper's arguments. Each raises ValueError or TypeError that names the argument, what it is and what is
allowed; none looks at a tensor's values, so that nothing waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
Size = int | str  # a number, or a name that stands for one number all through a call


def check_shapes(sizes: dict[str, int], **tensors: tuple[torch.Tensor, Sequence[Size]]) -> None:
    """Compare each tensor's shape with what it should be; `sizes` gains the names that are met for the first time.

    check_shapes(sizes := {}, x=(x, ("rows", "width")), weight=(weight, ("width",)))
    """
    for name, (tensor, wanted) in tensors.items():
        shape = tuple(tensor.shape)
        fits = len(shape) == len(wanted)
        for have, want in zip(shape, wanted, strict=False):
            fits = fits and have == (sizes.setdefault(want, have) if isinstance(want, str) else want)
        if not fits:
            allowed = ", ".join(f"{want}={sizes[want]}" if want in sizes else str(want) for want in map(str, wanted))
            raise ValueError(f"{name}: got shape {list(shape)}; allowed: [{allowed}]")


def check_dtypes(allowed: Sequence[torch.dtype], **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in allowed:
            raise TypeError(f"{name}: got {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def check_same_device(**tensors: torch.Tensor) -> torch.device:
    """The device that all tensors lie on."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}; allowed: {first.device}, as {first_name}")
    return first.device


def check_contiguous_rows(**tensors: torch.Tensor) -> None:
    """The last dimension of each has stride 1."""
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: got strides {tensor.stride()}; allowed: 1 for the last dimension")
