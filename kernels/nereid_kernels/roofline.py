"""`python -m nereid_kernels.roofline`: the least time that each operation can take on a GPU, and what sets it.

Always holds: nothing is measured, and every workload is either counted or named as left out. Bytes and operations are
counted from the launches that a GPU of that architecture would get (`nereid_kernels.cost`), peaks are the vendors'
published ones (Williams, Waterman and Patterson 2009).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from nereid_kernels.cost import Cost, count, has_formula
from nereid_kernels.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Gpu:
    architecture: str
    bandwidth: float  # bytes a second
    bf16: float  # operations a second, dense, on the matrix units
    source: str

    def floor_s(self, cost: Cost) -> float:
        return max(cost.distinct / self.bandwidth, cost.flops / self.bf16)

    def bound(self, cost: Cost) -> str:
        return "compute" if cost.flops / self.bf16 > cost.distinct / self.bandwidth else "memory"


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "A100": Gpu("sm_80", 2.039e12, 312e12, "NVIDIA A100 datasheet, SXM 80 GB"),
        "H100": Gpu("sm_90", 3.35e12, 989.5e12, "NVIDIA H100 datasheet, SXM; half of the figure with sparsity"),
        "H200": Gpu("sm_90", 4.8e12, 989.5e12, "NVIDIA H200 datasheet, SXM; half of the figure with sparsity"),
        "MI300X": Gpu("gfx942", 5.3e12, 1307.4e12, "AMD Instinct MI300X data sheet"),
    }
)


@dataclass(frozen=True, slots=True)
class Point:
    operation: str
    shape: str
    gpu: str
    cost: Cost

    @property
    def intensity(self) -> float:
        """Operations a byte of memory traffic."""
        return self.cost.flops / self.cost.distinct


def points(gpus: Sequence[str]) -> tuple[list[Point], list[str]]:
    """Those of the workloads whose kernels have a formula; the names of the others."""
    found: list[Point] = []
    left_out: list[str] = []
    for name in gpus:
        for (operation, shape), make in WORKLOADS.items():
            launches = make(torch.device("meta"), GPUS[name].architecture)
            if all(map(has_formula, launches)):
                found.append(Point(operation, shape, name, count(launches)))
            elif (words := f"{operation} {shape}") not in left_out:
                left_out.append(words)
    return found, left_out


def format_table(found: Sequence[Point], left_out: Sequence[str] = ()) -> str:
    rows: list[tuple[str, ...]] = [
        ("operation", "shape", "GPU", "MB asked", "MB memory", "GFLOP", "floor us", "bound by")
    ]
    for point in found:
        cost, gpu = point.cost, GPUS[point.gpu]
        numbers = ((cost.loaded + cost.stored) / 1e6, cost.distinct / 1e6, cost.flops / 1e9, gpu.floor_s(cost) * 1e6)
        rows.append((point.operation, point.shape, point.gpu, *(f"{n:.2f}" for n in numbers), gpu.bound(cost)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    used = sorted({point.gpu for point in found})
    sources = [f"{n}: {GPUS[n].bandwidth / 1e12:g} TB/s, {GPUS[n].bf16 / 1e12:g} TFLOP/s bf16 dense" for n in used]
    lines += ["", *(f"{s} ({GPUS[n].source})" for n, s in zip(used, sources, strict=True))]
    if left_out:
        lines += ["", f"left out, since values decide what they read and write: {', '.join(left_out)}"]
    return "\n".join(lines)


_WIDTH, _HEIGHT, _MARGIN = 760, 480, 60
_INTENSITY, _RATE = (0.1, 1e4), (1e11, 2e15)  # the axes' ends: operations a byte, operations a second


def format_plot(found: Sequence[Point]) -> str:
    """An SVG: each GPU's roof, and each operation on it. What has no matrix product lies outside and is left out."""

    def place(intensity: float, rate: float) -> tuple[float, float]:
        across, up = (math.log(v / low) / math.log(high / low) for v, (low, high) in zip(
            (intensity, rate), (_INTENSITY, _RATE), strict=True))  # fmt: skip
        return _MARGIN + across * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - up * (_HEIGHT - 2 * _MARGIN)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">']
    parts += [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>']
    for power in range(-1, 5):
        x, y = place(10.0**power, _RATE[0])
        parts += [f'<path d="M{x:.1f} {y} V{_MARGIN}" stroke="#ddd"/>', text(x, y + 16, f"{10.0**power:g}")]
    for power in range(11, 16):
        x, y = place(_INTENSITY[0], 10.0**power)
        parts += [f'<path d="M{x} {y:.1f} H{_WIDTH - _MARGIN}" stroke="#ddd"/>']
        parts += [text(x - 4, y, f"{10.0**power / 1e12:g}", "end")]
    parts += [text(_WIDTH / 2, _HEIGHT - 20, "operations a byte of memory traffic"), text(_MARGIN, 40, "TFLOP/s, bf16")]
    for number, name in enumerate(sorted({point.gpu for point in found})):
        gpu, colour = GPUS[name], ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")[number % 4]
        low = max(_INTENSITY[0], _RATE[0] / gpu.bandwidth)
        corners = [(low, low * gpu.bandwidth), (gpu.bf16 / gpu.bandwidth, gpu.bf16), (_INTENSITY[1], gpu.bf16)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*corner) for corner in corners))
        parts += [f'<polyline points="{line}" fill="none" stroke="{colour}"/>']
        parts += [f'<g fill="{colour}">{text(_MARGIN + 20, 70 + 14 * number, name, "start")}</g>']
        for point in found:
            if point.gpu == name and point.intensity >= low:
                x, y = place(point.intensity, point.cost.flops / gpu.floor_s(point.cost))
                label = text(x + 6, y + 12, f"{point.operation} {point.shape}", "start")
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>', label]
    return "\n".join([*parts, "</svg>\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nereid_kernels.roofline", description=__doc__)
    parser.add_argument("--gpu", action="append", choices=sorted(GPUS), help="one of several; all where left out")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the roofs and the operations into a file")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("roofline: needs the package triton, of which a launch is made", file=sys.stderr)
        return 1
    found, left_out = points(options.gpu or list(GPUS))
    print(format_table(found, left_out))
    if options.plot:
        options.plot.write_text(format_plot(found), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
