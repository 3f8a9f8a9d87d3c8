"""`python -m nereid_kernels.tune`: times candidate configurations on the GPU at hand, writes the best into the table.

Owns the lists of candidates. Always holds: only rows of this GPU's architecture are written, everything else in the
table stays as it is, and a serving process never measures anything: it reads the table.

Every kernel of the table is tuned, but only where workloads exist: in bfloat16, attention with heads of 128. All other
rows (float32, wider heads, other architectures, `any`) are chosen without a GPU, by the figures of the compiled code:
no spilled registers, shared memory that fits, pipelined loads, matrix units in use.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from nereid_kernels.backends import is_interpreting
from nereid_kernels.launch import TABLE, Config, Launch, architecture_of, override, run
from nereid_kernels.workloads import WORKLOADS, Make

Tiles = Mapping[str, tuple[int, ...]]
"""Constexpr arguments by name, and what is tried for each."""

_KEY = ("kernel", "architecture", "itemsize", "size")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row to find. make: the launches of one call, which ask the table for `kernel`."""

    kernel: str
    itemsize: int
    size: int
    make: Make
    num_warps: tuple[int, ...]
    num_stages: tuple[int, ...] = (1,)
    tiles: Tiles = field(default_factory=dict)

    def candidates(self) -> list[Config]:
        return [
            Config(warps, stages, MappingProxyType(dict(zip(self.tiles, chosen, strict=True))))
            for warps, stages in itertools.product(self.num_warps, self.num_stages)
            for chosen in itertools.product(*self.tiles.values())
        ]


def _problems() -> Iterator[Problem]:
    yield from _products()
    yield from _attention()
    yield from _elementwise()


def _products() -> Iterator[Problem]:
    tiles: Tiles = {"BLOCK_M": (64, 128), "BLOCK_N": (64, 128, 256), "BLOCK_K": (32, 64), "GROUP_M": (8,)}
    yield Problem("matmul", 2, 0, WORKLOADS["matmul", "512 x 4096 x 14336"], (4, 8), (3, 4), tiles)
    tiles = {"BLOCK_M": (16, 32, 64), "BLOCK_N": (64, 128), "BLOCK_K": (64, 128), "GROUP_M": (8,)}
    int8, int4 = (WORKLOADS["quantised_matmul", f"{name} 64 x 4096 x 14336"] for name in ("int8", "int4"))
    yield Problem("matmul_int8", 2, 0, int8, (4, 8), (3, 4), tiles)
    tiles = {name: sizes for name, sizes in tiles.items() if name != "BLOCK_K"}  # a step is a group of inputs
    yield Problem("matmul_int4", 2, 0, int4, (4, 8), (3, 4), tiles)


def _attention() -> Iterator[Problem]:
    """Short queries by decode and by verification, since one row serves both."""
    decode, prefill = "decode 64 x 4096", "prefill 8192"
    short = _together(WORKLOADS["paged_attention", decode], WORKLOADS["paged_attention", "verify 64 x 16, 4096"])
    tiles: Tiles = {"BLOCK_M": (16, 32, 64), "TILE": (32, 64, 128)}
    yield Problem("paged_attention_short", 2, 128, short, (4, 8), (2, 3, 4), tiles)
    tiles = {"BLOCK_M": (64, 128), "TILE": (32, 64, 128)}
    yield Problem("paged_attention_long", 2, 128, WORKLOADS["paged_attention", prefill], (4, 8), (2, 3, 4), tiles)
    tiles = {"MIN_SPLIT": (128, 256, 512), "MAX_SPLITS": (32, 64)}
    yield Problem("paged_attention_splits", 0, 0, WORKLOADS["paged_attention", decode], (1,), (1,), tiles)
    tiles = {"BLOCK_M": (16, 64), "BLOCK_N": (32, 64)}
    yield Problem("mla_attention_long", 2, 0, WORKLOADS["mla_attention", prefill], (4, 8), (2, 3), tiles)
    short = _together(WORKLOADS["mla_attention", decode], WORKLOADS["mla_attention", "verify 64 x 8, 4096"])
    tiles = {**tiles, "MIN_SPLIT": (256, 512), "MAX_SPLITS": (16, 32)}
    yield Problem("mla_attention_short", 2, 0, short, (4, 8), (2, 3), tiles)
    reduced = WORKLOADS["mla_attention", decode]
    yield Problem("mla_attention_reduction", 0, 0, reduced, (2, 4, 8), tiles={"BLOCK_ROWS": (1, 2, 4)})


def _elementwise() -> Iterator[Problem]:
    """What multiplies no matrices."""
    for size, shape in (2048, "1024 x 2048"), (8192, "1024 x 4096"), (0, "1024 x 16384"):
        yield Problem("rms_norm", 0, size, WORKLOADS["rms_norm", shape], (1, 2, 4, 8, 16, 32))
    heads, wide = {"BLOCK_HEADS": (1, 2, 4, 8)}, {"BLOCK": (1024, 2048, 4096)}
    for kernel in ("kv_write", "qk_norm_rope_kv_write"):
        yield Problem(kernel, 0, 0, WORKLOADS[kernel, "8192 tokens"], (1, 2, 4), tiles=heads)
    for kernel, operation, shape in (
        ("gated_activation", "gated_activation", "8192 x 14336"),
        ("copy_blocks", "block_ops", "copy 1024 blocks"),
        ("penalties", "penalties", "64 rows"),
        ("grammar_mask", "grammar_mask", "64 rows"),
        ("sample", "sample", "top_p 64"),
        ("verify_draft", "verify_draft", "64 x 4"),
    ):
        yield Problem(kernel, 0, 0, WORKLOADS[operation, shape], (4, 8, 16), tiles=wide)
    bias = WORKLOADS["penalties", "bias 64 x 64"]
    yield Problem("bias", 0, 0, bias, (1, 2), tiles={"BLOCK": (64, 128)})


def _together(*makes: Make) -> Make:
    """The launches of several workloads, one after the other."""
    return lambda device, architecture=None: [launch for make in makes for launch in make(device, architecture)]


PROBLEMS = tuple(_problems())


def fastest(problem: Problem, device: torch.device) -> tuple[Config, float]:
    """The best candidate and its milliseconds. Raises RuntimeError where none runs."""
    timed = []
    for config in problem.candidates():
        with override(problem.kernel, config):  # launches ask for it when they are made
            timed.append((config, _time_ms(problem.make(device))))
    config, milliseconds = min(timed, key=lambda pair: pair[1])
    if math.isinf(milliseconds):
        raise RuntimeError(f"{problem.kernel}: none of {len(timed)} candidates runs on {device}")
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
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to change")
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
