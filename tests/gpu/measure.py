"""How things are timed on a GPU, and the table that the benchmarks write.

Always holds: a time is the GPU's alone, with a cold cache, and a median; shares are of what this very machine reached
in the same run, copying and multiplying; each row says where it was measured.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from nereid_kernels.launch import Launch, architecture_of, run

Start = Callable[[], object]
Timer = Callable[[Start], float]
"""From what starts the work to seconds."""

_FLUSH_BYTES = 256 << 20  # more than any cache
_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192
_REPETITIONS = (7, 100)
_TIME_S = 0.1  # that repetitions may take


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine reaches. copy: bytes a second, read and written alike.  matmul: bf16 operations a second."""

    copy: float
    matmul: float

    def in_words(self) -> dict[str, str]:
        return {"copy_gb_per_s": f"{self.copy / 1e9:.5g}", "matmul_tflop_per_s": f"{self.matmul / 1e12:.5g}"}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. None: not measured, or nothing is known of its bytes or operations."""

    operation: str
    shape: str
    implementation: str
    microseconds: float | None = None
    gb_per_s: float | None = None
    share_of_copy: float | None = None
    tflop_per_s: float | None = None
    share_of_matmul: float | None = None
    verification_to_decode: float | None = None
    note: str = ""


def make_row(
    operation: str,
    shape: str,
    implementation: str,
    seconds: float,
    peaks: Peaks,
    distinct: int | None = None,
    flops: int | None = None,
    ratio: float | None = None,
) -> Row:
    """distinct: bytes that have to cross the memory bus.  flops: of matrix products.  None: there is no formula."""
    bandwidth = None if distinct is None else distinct / seconds
    rate = None if not flops else flops / seconds
    return Row(
        operation,
        shape,
        implementation,
        seconds * 1e6,
        None if bandwidth is None else bandwidth / 1e9,
        None if bandwidth is None else bandwidth / peaks.copy,
        None if rate is None else rate / 1e12,
        None if rate is None else rate / peaks.matmul,
        ratio,
    )


def starter(launches: Sequence[Launch]) -> Start:
    def start() -> None:
        for launch in launches:
            run(launch)

    return start


def median_s(start: Start) -> float:
    """Of a CUDA graph, so that no time of the host is in it."""
    for _ in range(2):
        start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    first = _replay(graph, flush, 1)[0]
    least, most = _REPETITIONS
    return statistics.median(_replay(graph, flush, min(max(int(_TIME_S / first), least), most)))


def _replay(graph: torch.cuda.CUDAGraph, flush: torch.Tensor, repetitions: int) -> list[float]:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repetitions)]
    for begin, end in pairs:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def measure_peaks() -> Peaks:
    source, target = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device="cuda")
    copy_s = median_s(lambda: target.copy_(source))
    a, b = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    return Peaks(2 * _COPY_BYTES / copy_s, 2 * _MATMUL_SIZE**3 / median_s(lambda: a @ b))


def place() -> dict[str, str]:
    """Where this is measured, and with what."""
    device = torch.device("cuda")
    return {
        "machine": torch.cuda.get_device_name(),
        "architecture": architecture_of(device),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
    }


def _commit() -> str:
    """Of this checkout; a copy without its history is told by NEREID_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head, changed = (
        subprocess.run([*git, *command], capture_output=True, text=True)
        for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    if head.returncode:
        return os.environ.get("NEREID_COMMIT", "unknown")
    return head.stdout.strip() + ("-changed" if changed.stdout.strip() else "")


@contextmanager
def table(path: Path, constant: Mapping[str, str]) -> Iterator[Callable[[Row], None]]:
    """What prints a row and adds it to a CSV file, at once, so that a run that is cut off leaves its rows."""
    names = [field.name for field in fields(Row)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names, *constant], lineterminator="\n")
        writer.writeheader()

        def add(row: Row) -> None:
            print(in_words(row), flush=True)
            numbers = {n: f"{v:.5g}" if isinstance(v, float) else v for n, v in asdict(row).items()}
            writer.writerow({**numbers, **constant})
            file.flush()

        yield add


def failure(error: Exception) -> str:
    """In one line, as a row's note."""
    return "failed: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]


def in_words(row: Row) -> str:
    parts = [f"{row.operation:22} {row.shape:32} {row.implementation:10}"]
    if row.microseconds is not None:
        parts.append(f"{row.microseconds:10.1f} us")
    if row.gb_per_s is not None and row.share_of_copy is not None:
        parts.append(f"{row.gb_per_s:8.1f} GB/s ({row.share_of_copy:4.0%} of copying)")
    if row.tflop_per_s is not None and row.share_of_matmul is not None:
        parts.append(f"{row.tflop_per_s:7.1f} TFLOP/s ({row.share_of_matmul:4.0%} of matmul)")
    if row.verification_to_decode is not None:
        parts.append(f"{row.verification_to_decode:.2f} x decode")
    return "  ".join([*parts, row.note]).rstrip()
