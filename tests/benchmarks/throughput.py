"""Tokens per second of one stream against many at once, time to the first token, and time to READY, on a real server.

    .venv/bin/python tests/benchmarks/throughput.py --rounds 3 --csv throughput.csv

One and many streams run in turn, so that both meet the same state of the machine; the ratio is taken pair by pair.
The client shares the processor with the server. Prints a table, and writes each run as a line of CSV.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT))

from nereid.cli.provision import SERVER_VERSION, provision_server  # noqa: E402
from nereid.cli.server_process import ServerOptions, TritonServer  # noqa: E402
from tests.server.conftest import free_ports  # noqa: E402
from tests.server.grpc_client import GrpcStream, Streamed  # noqa: E402

_PROMPT = "Story number {number}: once upon a time"
_GOAL = 5.0
_RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement. Times in seconds; ttft: median over the streams, from the sending of all to the first text."""

    round: int
    streams: int
    tokens: int
    seconds: float
    tokens_per_second: float
    ttft: float


def start_server(repository: Path, model: str, folder: Path) -> tuple[TritonServer, float]:
    """A ready server, and how long it took."""
    http_port, grpc_port, metrics_port = free_ports(3)
    server = TritonServer(
        ServerOptions(
            tree=provision_server(print),
            repository=repository,
            models=(model,),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            log=folder / "tritonserver.log",
        )
    )
    started = time.monotonic()
    server.start()
    try:
        server.wait_ready(600)
    except BaseException:
        server.stop()
        raise
    return server, time.monotonic() - started


def measure(server: TritonServer, model: str, number: int, num_streams: int, max_tokens: int) -> Run:
    """`num_streams` requests at once on one gRPC stream."""
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with GrpcStream(server) as stream:
        started = time.monotonic()
        for index in range(num_streams):
            stream.send(model, str(index), _PROMPT.format(number=index), sampling)
        answers = list(stream.wait_done(_RUN_TIMEOUT_S).values())
    seconds = max(answer.at[-1] for answer in answers) - started
    tokens = sum(answer.num_tokens for answer in answers)
    if tokens != num_streams * max_tokens:
        raise SystemExit(f"{tokens} tokens came instead of {num_streams * max_tokens}")
    return Run(number, num_streams, tokens, seconds, tokens / seconds, _ttft(answers, started))


def _ttft(answers: Sequence[Streamed], started: float) -> float:
    return statistics.median(answer.at[0] - started for answer in answers)


def measure_in_turn(server: TritonServer, args: argparse.Namespace) -> list[Run]:
    measure(server, args.model, 0, args.streams, 4)  # warm-up
    runs = []
    for number in range(1, args.rounds + 1):
        for num_streams in (1, args.streams):
            run = measure(server, args.model, number, num_streams, args.tokens)
            print(f"{run.round:5} {run.streams:8} {run.tokens_per_second:10.1f} {run.ttft * 1e3:10.0f}", flush=True)
            runs.append(run)
    return runs


def paired_ratio(runs: Sequence[Run]) -> float:
    """Median over the rounds of tokens per second of many streams to that of one."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return statistics.median(many.tokens_per_second / one.tokens_per_second for one, many in pairs)


def circumstances() -> dict[str, str]:
    """What a number means nothing without."""
    commit = subprocess.run(
        ["git", "-C", str(_PROJECT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    cpu = next((s.partition(": ")[2] for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), "?")
    cores = len([s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("processor")])
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "tritonclient")}
    own = {"machine": f"{cores} x {cpu}", "commit": commit.stdout.strip() or "?", "python": platform.python_version()}
    return {**own, "tritonserver": SERVER_VERSION, **versions}


def write_csv(path: Path, runs: Sequence[Run], shared: dict[str, str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Run)] + list(shared))
        writer.writeheader()
        writer.writerows({**asdict(run), **shared} for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-repository", type=Path, default=_PROJECT / "model_repository")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16, help="how many at once")
    parser.add_argument("--tokens", type=int, default=64, help="per stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first, _ = start_server(args.model_repository, args.model, Path(folder))
        first.stop()
        server, ready_s = start_server(args.model_repository, args.model, Path(folder))
        print(f"READY {ready_s:.1f} s after a second start\n\nround  streams   tokens/s    TTFT ms")
        try:
            runs = measure_in_turn(server, args)
        finally:
            server.stop()
    ratio = paired_ratio(runs)
    print(f"\n{args.streams} streams against one: {ratio:.2f} times the tokens per second (median of the pairs)")
    if args.csv:
        write_csv(args.csv, runs, {**circumstances(), "ready_s": f"{ready_s:.2f}", "ratio": f"{ratio:.3f}"})
    return 0 if ratio >= _GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
