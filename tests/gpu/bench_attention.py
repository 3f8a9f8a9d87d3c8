"""`python -m tests.gpu.bench_attention --csv FILE`: times attention on the GPU at hand, and says which goals are met.

Decode, verification and prefill of Llama-3.1-8B's shape (32 query and 8 KV heads of 128, bf16, blocks of 16), and MLA
decode of DeepSeek-V3's with all of its 128 heads, or 16 of them, as one of 8 GPUs has. Beside them torch's own
attention, and FlashInfer where it is installed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nereid_kernels.backends import is_interpreting
from nereid_kernels.cost import count
from nereid_kernels.launch import Launch
from nereid_kernels.splitting import SPLIT_QUERY
from nereid_kernels.workloads import layers
from tests.gpu import opponents
from tests.gpu.measure import Peaks, Row, Timer, failure, make_row, measure_peaks, median_s, place, starter, table

_SPARE_BYTES = 6 << 30  # beside the cache: what splits leave, results, what flushes the caches


@dataclass(frozen=True, slots=True)
class Point:
    """One problem: all sequences of the same length."""

    operation: str
    seqs: int
    query_len: int
    seq_len: int
    heads: int = 32

    @property
    def kind(self) -> str:
        kind = "decode" if self.query_len == 1 else "verify" if self.query_len <= SPLIT_QUERY else "prefill"
        return f"MLA {kind}" if self.operation == "mla_attention" else kind

    @property
    def shape(self) -> str:
        verified = f" {self.query_len}," if self.kind == "verify" else ""
        heads = f", {self.heads} heads" if self.operation == "mla_attention" else ""
        return f"{self.kind}{verified} {self.seqs} x {self.seq_len}{heads}"

    @property
    def cache_bytes(self) -> int:
        per_token = (512 + 64) if self.operation == "mla_attention" else 2 * 8 * 128
        return 2 * per_token * self.seqs * self.seq_len

    @property
    def flops(self) -> int:
        """Of the keys that each query token sees."""
        keys = self.seqs * sum(range(self.seq_len - self.query_len + 1, self.seq_len + 1))
        return 2 * self.heads * keys * (512 + 64 + 512 if self.operation == "mla_attention" else 2 * 128)

    def launches(self, device: torch.device, architecture: str | None = None) -> Sequence[Launch]:
        lengths = {"seqs": self.seqs, "query_len": self.query_len, "seq_len": self.seq_len}
        make = layers.mla_attention if self.operation == "mla_attention" else layers.paged_attention
        return make(device, architecture, **lengths, heads=self.heads)


POINTS: tuple[Point, ...] = (
    Point("paged_attention", 1, 16384, 16384),
    *(
        Point("paged_attention", seqs, query_len, seq_len)
        for seq_len in (8192, 65536, 1024)
        for seqs in (16, 64, 256, 1)
        for query_len in (1, 4, 8)
    ),
    *(
        Point("mla_attention", seqs, 1, seq_len, heads)
        for heads in (128, 16)
        for seq_len in (8192, 65536, 1024)
        for seqs in (16, 64, 256, 1)
    ),
    *(Point("paged_attention", seqs, seq_len, seq_len) for seqs, seq_len in ((16, 1024), (4, 4096), (1, 65536))),
)
"""What matters most comes first, and decode before the verification that is compared with it."""

FLEX_POINTS = (POINTS[0], *(Point("paged_attention", 16, query_len, 8192) for query_len in (1, 8)))
"""What flex_attention, which is compiled anew for each problem, is compared at."""


@dataclass(frozen=True, slots=True)
class Goal:
    """applies: to which points.  value: of a row; the worst of all counts."""

    text: str
    applies: Callable[[Point], bool]
    value: Callable[[Row], float | None]
    wanted: float
    is_limit: bool = False  # at most, where other goals are at least


def _is_large(point: Point) -> bool:
    return point.seqs >= 16 and point.seq_len >= 8192


def _best_share(row: Row) -> float:
    return max(row.share_of_copy or 0.0, row.share_of_matmul or 0.0)


GOALS = (
    Goal(
        "decode and verification: 85 % of the copy bandwidth, from 16 x 8192 on",
        lambda p: p.kind in ("decode", "verify") and _is_large(p),
        lambda row: row.share_of_copy,
        0.85,
    ),
    Goal(
        "verification of 8: at most 1.3 x decode",
        lambda p: p.kind == "verify" and p.query_len == 8,
        lambda row: row.verification_to_decode,
        1.3,
        is_limit=True,
    ),
    Goal(
        "prefill of 16384, causal, head_dim 128: 500 TFLOP/s",
        lambda p: p.kind == "prefill" and p.seq_len == 16384,
        lambda row: row.tflop_per_s,
        500.0,
    ),
    Goal(
        "MLA decode: 75 % of the copy bandwidth or of the matrix rate, the nearer one, from 16 x 8192 on",
        lambda p: p.kind == "MLA decode" and _is_large(p),
        _best_share,
        0.75,
    ),
)


def judge(results: Mapping[Point, Row]) -> list[str]:
    """One line a goal, from this library's own rows."""
    lines = []
    for goal in GOALS:
        points = [point for point in POINTS if goal.applies(point)]
        found = [(v, p) for p in points if p in results and (v := goal.value(results[p])) is not None]
        if not found:
            lines.append(f"not measured: {goal.text}")
            continue
        worst, point = (max if goal.is_limit else min)(found, key=lambda pair: pair[0])
        verdict = "met" if (worst <= goal.wanted if goal.is_limit else worst >= goal.wanted) else "missed"
        missing = (
            f"; {len(points) - len(found)} of {len(points)} points not measured" if len(found) < len(points) else ""
        )
        lines.append(f"{verdict}: {goal.text}: worst {worst:.3g} at {point.shape}{missing}")
    return lines


def measure(point: Point, launches: Sequence[Launch], peaks: Peaks, timer: Timer, decode: Row | None = None) -> Row:
    """decode: the row of as many sequences of this length, for the ratio."""
    seconds = timer(starter(launches))
    ratio = seconds * 1e6 / decode.microseconds if decode and decode.microseconds else None
    distinct = count(launches).distinct
    return make_row(point.operation, point.shape, "nereid", seconds, peaks, distinct, point.flops, ratio)


def compare(
    point: Point, launches: Sequence[Launch], peaks: Peaks, timer: Timer, others: Mapping[str, opponents.Opponent]
) -> list[Row]:
    """With other kernels for paged_attention's problems."""
    rows, distinct = [], count(launches).distinct
    arguments = next(launch.arguments for launch in launches if launch.name == "paged_attention")
    for name, opponent in others.items():
        try:
            seconds = timer(opponent(arguments))
            rows.append(make_row(point.operation, point.shape, name, seconds, peaks, distinct, point.flops))
        except Exception as error:  # whatever another's kernel raises is its result
            rows.append(Row(point.operation, point.shape, name, note=failure(error)))
    return rows


def _measure_all(device: torch.device, peaks: Peaks, deadline: float, add: Callable[[Row], None]) -> dict[Point, Row]:
    results: dict[Point, Row] = {}
    others = opponents.available()
    for point in POINTS:
        torch.cuda.empty_cache()
        name = (point.operation, point.shape, "nereid")
        if time.monotonic() > deadline:
            add(Row(*name, note="left out: no time was left"))
            continue
        if torch.cuda.mem_get_info(device)[0] < point.cache_bytes + _SPARE_BYTES:
            add(Row(*name, note="left out: does not fit into the memory"))
            continue
        decode = results.get(replace(point, query_len=1)) if point.kind == "verify" else None
        try:
            launches = point.launches(device)
            results[point] = measure(point, launches, peaks, median_s, decode)
        except Exception as error:  # the next point may still run
            results[point] = Row(*name, note=failure(error))
        add(results[point])
        if point.operation == "paged_attention" and results[point].microseconds is not None:
            for row in compare(point, launches, peaks, median_s, others):
                add(row)
    for point in FLEX_POINTS:
        if time.monotonic() < deadline:
            for row in compare(point, point.launches(device), peaks, median_s, {"flex": opponents.flex}):
                add(row)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bench_attention", description=__doc__)
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no other problem is begun")
    options = parser.parse_args(arguments)
    if is_interpreting() or not torch.cuda.is_available():
        print("bench_attention: needs a GPU, and TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    deadline = time.monotonic() + options.seconds
    peaks, constant = measure_peaks(), place()
    print(*(f"{name} {value}" for name, value in constant.items()), sep=", ")
    print(f"copies {peaks.copy / 1e9:.0f} GB/s, multiplies bf16 at {peaks.matmul / 1e12:.0f} TFLOP/s")
    with table(options.csv, constant | peaks.in_words()) as add:
        results = _measure_all(torch.device("cuda"), peaks, deadline, add)
    print(*judge(results), sep="\n")
    return int(any(row.note for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
