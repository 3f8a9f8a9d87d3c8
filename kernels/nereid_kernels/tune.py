"""`python -m nereid_kernels.tune`: times candidate configurations on the GPU at hand, writes the best into the table.

Owns the lists of candidates. Always holds: only rows of this GPU's architecture are written, everything else in the
table stays as it is, and a serving process never measures anything: it reads the table.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nereid_kernels import launch as table
from nereid_kernels import workloads as work
from nereid_kernels.backends import is_interpreting
from nereid_kernels.launch import Config, Launch, architecture_of, run

_KEY = ("kernel", "architecture", "itemsize", "size")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row to find. make: the launches of one call on a device, which ask the table for `kernel`."""

    kernel: str
    itemsize: int
    size: int
    make: Callable[[torch.device], Sequence[Launch]]
    num_warps: tuple[int, ...]
    num_stages: tuple[int, ...] = (1,)
    tiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def candidates(self) -> list[Config]:
        return [
            Config(warps, stages, MappingProxyType(dict(zip(self.tiles, chosen, strict=True))))
            for warps, stages in itertools.product(self.num_warps, self.num_stages)
            for chosen in itertools.product(*self.tiles.values())
        ]


def _problems() -> Iterator[Problem]:
    for size, width in (2048, 2048), (8192, 4096), (0, 16384):
        make = partial(work.add_rms_norm, rows=1024, width=width)
        yield Problem("rms_norm", 0, size, make, (1, 2, 4, 8, 16, 32))
    tiles = {"BLOCK_M": (64, 128), "BLOCK_N": (64, 128, 256), "BLOCK_K": (32, 64), "GROUP_M": (8,)}
    make = partial(work.matmul, rows=512, in_features=4096, out_features=14336)
    yield Problem("matmul", 2, 0, make, (4, 8), (3, 4), tiles)
    decode: dict[str, Any] = {"seqs": 64, "query_len": 1, "seq_len": 4096}
    prefill: dict[str, Any] = {"seqs": 1, "query_len": 8192, "seq_len": 8192}
    for kind, lengths, block_m in ("short", decode, (16, 64)), ("long", prefill, (64, 128)):
        tiles = {"BLOCK_M": block_m, "TILE": (32, 64, 128), "MIN_SPLIT": (256, 512)}
        make = partial(work.paged_attention, **lengths)
        yield Problem(f"paged_attention_{kind}", 2, 128, make, (4, 8), (2, 3, 4), tiles)
    tiles = {"BLOCK_M": (16, 64), "BLOCK_N": (32, 64)}
    yield Problem("mla_attention_long", 2, 0, partial(work.mla_attention, **prefill), (4, 8), (2, 3), tiles)
    tiles |= {"MIN_SPLIT": (256, 512), "MAX_SPLITS": (16, 32)}
    yield Problem("mla_attention_short", 2, 0, partial(work.mla_attention, **decode), (4, 8), (2, 3), tiles)


PROBLEMS = tuple(_problems())


@contextmanager
def only(kernel: str, architecture: str, config: Config) -> Iterator[None]:
    """Inside, the table has this one configuration for `kernel`. Launches ask for it when they are made."""
    original = table._table
    rows = {**original(), kernel: (table._Row(architecture, 0, 0, config),)}
    table._table = lambda: rows  # type: ignore[assignment]
    try:
        yield
    finally:
        table._table = original


def fastest(problem: Problem, device: torch.device) -> tuple[Config, float]:
    """The best candidate and its milliseconds. Raises RuntimeError where none runs."""
    architecture = architecture_of(device)
    timed = []
    for config in problem.candidates():
        with only(problem.kernel, architecture, config):
            timed.append((config, _time_ms(problem.make(device))))
    config, milliseconds = min(timed, key=lambda pair: pair[1])
    if math.isinf(milliseconds):
        raise RuntimeError(f"{problem.kernel}: none of {len(timed)} candidates runs on {architecture}")
    return config, milliseconds


def _time_ms(launches: Sequence[Launch]) -> float:
    """Infinite where the GPU has too little of something for it."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    def start() -> None:
        for launch in launches:
            run(launch)

    try:
        return float(do_bench(start, return_mode="median"))
    except OutOfResources:
        return math.inf


def as_row(problem: Problem, architecture: str, config: Config) -> dict[str, str]:
    tiles = " ".join(f"{name}={value}" for name, value in config.tiles.items())
    numbers = (problem.itemsize, problem.size, config.num_warps, config.num_stages)
    values = (problem.kernel, architecture, *map(str, numbers), tiles)
    return dict(zip((*_KEY, "num_warps", "num_stages", "tiles"), values, strict=True))


def write(path: Path, new: Mapping[str, str]) -> None:
    """`new` in the place of the row with its key, or else after the last row of its kernel."""
    rows: list[Mapping[str, str]] = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    keys = [[row[name] for name in _KEY] for row in rows]
    if (key := [new[name] for name in _KEY]) in keys:
        rows[keys.index(key)] = new
    else:
        after = max((n + 1 for n, row in enumerate(rows) if row["kernel"] == new["kernel"]), default=len(rows))
        rows.insert(after, new)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(new), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nereid_kernels.tune", description=__doc__)
    parser.add_argument("--kernel", action="append", choices=sorted({p.kernel for p in PROBLEMS}))
    parser.add_argument("--table", type=Path, default=table._TABLE, help="the file to change")
    options = parser.parse_args(arguments)
    if is_interpreting() or not torch.cuda.is_available():
        print("tune: needs a GPU, and TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    for problem in PROBLEMS:
        if options.kernel is None or problem.kernel in options.kernel:
            config, milliseconds = fastest(problem, device)
            row = as_row(problem, architecture_of(device), config)
            write(options.table, row)
            print(f"{','.join(row.values())}: {milliseconds * 1e3:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
