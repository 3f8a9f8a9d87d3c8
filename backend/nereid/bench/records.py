"""One line of CSV for each run, with what its figures mean nothing without.

Always holds: a line is written when its run is over, so that a benchmark that ends early keeps what it has measured.
"""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from nereid.bench.ceilings import Ceilings
from nereid.bench.measures import Measures


@dataclass(frozen=True, slots=True)
class Run:
    """One workload done once. round: from 1 on.  versions: of the engine and what it stands on.  taken: share of all
    cores that others took meanwhile, from 0 to 1.  ceilings: what the machine could do just before this workload's runs
    in this round, since other machines on the same processor change that from one minute to the next."""

    round: int
    engine: str
    workload: str
    measures: Measures
    versions: str
    taken: float
    ceilings: Ceilings


@dataclass(frozen=True, slots=True)
class Circumstances:
    """machine: the processor's name.  cores: that this process may use.  commit: of the checkout; with -dirty where
    files differ from it."""

    machine: str
    cores: int
    commit: str
    python: str

    def __str__(self) -> str:
        return f"{self.cores} cores of {self.machine}; commit {self.commit}; Python {self.python}"


def circumstances(checkout: Path) -> Circumstances:
    """Those of now."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    machine = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return Circumstances(machine, len(os.sched_getaffinity(0)), commit or "unknown", platform.python_version())


def write_rows(path: Path, rows: Sequence[Mapping[str, object]], where: Circumstances) -> None:
    """A CSV file of `rows`, which have the same columns, with `where` in each. Raises OSError."""
    shared = asdict(where)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *shared])
        writer.writeheader()
        writer.writerows({**row, **shared} for row in rows)


class RecordFile:
    """A CSV file that grows run by run; without a path, nothing is written."""

    def __init__(self, path: Path | None, where: Circumstances) -> None:
        """Raises OSError where `path` cannot be written."""
        self._path = path
        self._shared = asdict(where)
        if path is not None:
            own = ["round", "engine", "workload", "taken", *(f.name for f in fields(Measures)), "versions"]
            self._columns = [*own, *(f"ceiling_{f.name}" for f in fields(Ceilings)), *self._shared]
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writeheader()

    def add(self, run: Run) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(self._row(run))

    def _row(self, run: Run) -> Mapping[str, object]:
        measured = {
            name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(run.measures).items()
        }
        own = {"round": run.round, "engine": run.engine, "workload": run.workload, "versions": run.versions}
        own["taken"] = f"{run.taken:.3f}"
        ceilings = {f"ceiling_{name}": f"{value:.4g}" for name, value in asdict(run.ceilings).items()}
        return {**own, **measured, **ceilings, **self._shared}
