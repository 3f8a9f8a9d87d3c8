"""Which implementation runs an operation: Triton-lang kernels on a GPU, plain PyTorch on a CPU. Pure functions.

Every wrapper picks by the device of its tensors, and takes `backend` for who wants another: "triton_lang" on the CPU is
the interpreter, which has to be switched on (TRITON_INTERPRET=1) before triton is imported. "native" is for plans
of a step that a `native.program` carries out.
"""

from __future__ import annotations

import os

import torch

BACKENDS = ("auto", "cpu", "triton_lang", "native")


def pick(device: torch.device, backend: str = "auto") -> str:
    """Never "auto". Raises ValueError where `backend` is none of BACKENDS, or cannot run on `device`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}; allowed: {', '.join(BACKENDS)}")
    on_cpu = device.type == "cpu"
    if backend == "auto":
        return "cpu" if on_cpu else "triton_lang"
    if backend in ("cpu", "native") and not on_cpu:
        raise ValueError(f"backend: got {backend!r} for tensors on {device}; allowed: auto, triton_lang")
    if backend == "triton_lang" and on_cpu and not is_interpreting():
        raise ValueError(
            "backend: got 'triton_lang' for tensors on the CPU; allowed: auto, cpu, or TRITON_INTERPRET=1 set before "
            "triton is imported, which runs the kernels in its interpreter"
        )
    return backend


def is_interpreting() -> bool:
    """Whether Triton-lang kernels run in the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


def describe(device: torch.device, backend: str = "auto") -> str:
    """What `pick` picks, in words for a log."""
    if pick(device, backend) == "cpu":
        return "PyTorch on the CPU"
    return "Triton-lang kernels in the interpreter" if device.type == "cpu" else f"Triton-lang kernels on {device}"
