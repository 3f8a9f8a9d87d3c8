"""`python -m tests.gpu.bench_operations --csv FILE`: times every operation on the GPU at hand.

The problems are nereid_kernels.workloads' own; bytes and operations by nereid_kernels.cost, where it has the formulas:
those of matrix products with the padding of their tiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nereid_kernels.backends import is_interpreting
from nereid_kernels.cost import count, has_formula
from nereid_kernels.launch import Launch
from nereid_kernels.workloads import WORKLOADS
from tests.gpu.measure import Peaks, Row, Timer, failure, make_row, measure_peaks, median_s, place, starter, table


def measure(operation: str, shape: str, launches: Sequence[Launch], peaks: Peaks, timer: Timer) -> Row:
    cost = count(launches) if all(map(has_formula, launches)) else None
    seconds = timer(starter(launches))
    distinct, flops = (None, None) if cost is None else (cost.distinct, cost.flops)
    return make_row(operation, shape, "nereid", seconds, peaks, distinct, flops)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bench_operations", description=__doc__)
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no other problem is begun")
    options = parser.parse_args(arguments)
    if is_interpreting() or not torch.cuda.is_available():
        print("bench_operations: needs a GPU, and TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    status, deadline = 0, time.monotonic() + options.seconds
    peaks = measure_peaks()
    with table(options.csv, place() | peaks.in_words()) as add:
        for (operation, shape), make in WORKLOADS.items():
            if time.monotonic() > deadline:
                add(Row(operation, shape, "nereid", note="left out: no time was left"))
                continue
            try:
                add(measure(operation, shape, make(torch.device("cuda")), peaks, median_s))
            except Exception as error:  # the next one may still run
                add(Row(operation, shape, "nereid", note=failure(error)))
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
