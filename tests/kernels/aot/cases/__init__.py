"""Launches that are compiled ahead of time, one module an operation: what is served, and what compiles differently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nereid_kernels.launch import Launch

FULLY = ("sm_90", "gfx942")  # the targets of variants, too


def pick(launches: Iterable[Launch], kernel: str, **arguments: Any) -> Launch:
    """The first launch of this kernel that has these arguments."""
    return next(
        launch
        for launch in launches
        if launch.name == kernel and all(launch.arguments[name] == value for name, value in arguments.items())
    )
