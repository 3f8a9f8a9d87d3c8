"""How kernels are started: a launch as plain data, its configuration from a committed table, and `run`.

`choose` is a pure function of kernel, architecture, element size and a size of the problem: nothing is measured while
serving. `python -m nereid_kernels.tune` writes the table anew on a GPU. Because a Launch is data, the same object is
run on a GPU or in the interpreter, compiled ahead of time for a target that is not at hand, and counted for a roofline.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
TABLE = Path(__file__).with_name("launch_table.csv")
_ARCHITECTURE = re.compile(r"(sm_|gfx)([0-9a-f]+)$")
INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True)
class Config:
    """tiles: constexpr arguments of the kernel by name, such as BLOCK_M."""

    num_warps: int
    num_stages: int
    tiles: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a kernel. kernel: a `triton.jit` function.  arguments: by the names of its parameters, constexpr
    ones included; tensors may lie on the meta device where the launch is only compiled or counted."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).lstrip("_")


_overrides: ContextVar[Mapping[str, Config]] = ContextVar("overrides", default=MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class _Row:
    architecture: str
    itemsize: int  # bytes an element; 0 is any
    size: int  # up to this size; 0 is any
    config: Config


def run(launch: Launch) -> None:
    """Start the kernel on the device of its tensors. A grid with a 0 in it starts nothing."""
    if 0 in launch.grid:
        return
    _LOG.debug("launch %s grid %s", launch.name, launch.grid)
    tensor = next(value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    # Triton-lang launches on the current device, whatever device its tensors are on.
    with torch.cuda.device(tensor.get_device()):  # -1, which changes nothing, on the CPU
        launch.kernel[launch.grid](**launch.arguments, num_warps=launch.num_warps, num_stages=launch.num_stages)


def architecture_of(device: torch.device) -> str:
    """ "sm_90", "gfx942", ... of a GPU; "interpreter" of the CPU, where nothing else runs Triton-lang kernels."""
    if device.type == "cpu":
        return INTERPRETER
    if device.type != "cuda":
        raise ValueError(f"device: got {device}; allowed: cpu, cuda")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@contextmanager
def override(kernel: str, config: Config) -> Iterator[None]:
    """Inside, `choose` gives this configuration for `kernel`, whatever the table says: to tune it, or to test it."""
    token = _overrides.set({**_overrides.get(), kernel: config})
    try:
        yield
    finally:
        _overrides.reset(token)


def choose(kernel: str, architecture: str, *, itemsize: int = 0, size: int = 0) -> Config:
    """The configuration of `kernel`: of the nearest architecture that the table has, then of the smallest size that
    holds `size`. Raises ValueError where the table has none."""
    if kernel in (overrides := _overrides.get()):
        return overrides[kernel]
    return _look_up(kernel, architecture, itemsize, size)


@cache  # every launch asks, for the few sizes that a deployment has
def _look_up(kernel: str, architecture: str, itemsize: int, size: int) -> Config:
    found = _table().get(kernel, ())
    rows = [row for row in found if row.itemsize in (0, itemsize) and (row.size == 0 or row.size >= size)]
    ranked = [(rank, row) for row in rows if (rank := _distance(architecture, row.architecture)) is not None]
    if not ranked:
        raise ValueError(f"{kernel}: {TABLE.name} has no row for {architecture}, {itemsize} bytes, size {size}")
    return min(ranked, key=lambda r: (r[0], r[1].itemsize == 0, r[1].size or 1 << 62))[1].config


def _distance(wanted: str, row: str) -> int | None:
    """How far a row's architecture is from the wanted one, 0 is the same; None where it does not fit."""
    if row == "any":
        return 1 << 30
    if wanted == row:
        return 0
    ours, theirs = _ARCHITECTURE.match(wanted), _ARCHITECTURE.match(row)
    if ours is None or theirs is None or ours[1] != theirs[1]:
        return None
    gap = int(ours[2], 16) - int(theirs[2], 16)
    return gap if gap >= 0 else None  # what was tuned for a newer one may not fit


@cache
def _table() -> Mapping[str, tuple[_Row, ...]]:
    rows: dict[str, list[_Row]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            tiles = dict(pair.split("=") for pair in line["tiles"].split())
            config = Config(
                int(line["num_warps"]),
                int(line["num_stages"]),
                MappingProxyType({name: int(value) for name, value in tiles.items()}),
            )
            row = _Row(line["architecture"], int(line["itemsize"]), int(line["size"]), config)
            rows.setdefault(line["kernel"], []).append(row)
    return MappingProxyType({kernel: tuple(found) for kernel, found in rows.items()})
