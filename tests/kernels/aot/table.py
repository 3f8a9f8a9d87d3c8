"""The committed table of what the compiler makes of every case, for each target and each version of Triton-lang.

`python -m tests.kernels.aot.table` writes figures.csv anew, and names the rows that break a rule; test_aot.py compares.
Always holds: this process imports no Triton-lang. Cases are compiled in worker processes (this module with `--worker
VERSION SHARE`), which print one JSON object a case.
"""

from __future__ import annotations

import csv
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kernels.aot.rules import SHARED_LIMIT, Key, Row, broken_rules, name_of, shallowest
from tests.kernels.triton_lang_versions import ROOT, VERSIONS, environment

TABLE = Path(__file__).with_name("figures.csv")
MAX_ROWS = 150  # of a version
WORKERS = 2
REGISTER_BUDGET = 8  # what a change of the code may cost without a new table
SHARED_BUDGET = 1024
_TIMEOUT_S = 1500
_KEY = ("triton_lang", "case", "architecture")
_HAVE_TO_STAY = ("wgmma", "mma", "async_copies", "tma_loads", "wide_loads")
# What multiplies no matrices is the same code for all that come after sm_80: sm_90 stands for them.
_ELEMENTWISE = re.compile(
    r"(block_ops|gated_activation|grammar_mask|kv_write|penalties|qk_norm_rope_kv_write|rms_norm"
    r"|sample|verify_draft|mla_attention\.reduction|paged_attention\.reduce)"
)
_LEFT_OUT = ("sm_100", "sm_120")


@dataclass(frozen=True, slots=True)
class Measured:
    rows: dict[Key, Row]
    failures: list[str]  # one line a case that does not compile


def measure(version: str) -> Measured:
    """Compile every case for every target with this version. Raises RuntimeError where a worker dies."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--worker", version]
    workers = [
        subprocess.Popen(
            [*command, str(share)],
            cwd=ROOT,
            env=environment(version, interpret=False),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in range(WORKERS)
    ]
    rows: dict[Key, Row] = {}
    failures = []
    try:
        for worker in workers:
            said, complaint = worker.communicate(timeout=_TIMEOUT_S)
            if worker.returncode != 0:
                raise RuntimeError(f"a worker ended with status {worker.returncode}:\n{complaint[-4000:]}")
            for row in map(json.loads, said.splitlines()):
                if "failure" in row:
                    failures.append(f"{name_of(_key(row))}: does not compile: {row['failure']}")
                else:
                    rows[_key(row)] = {name: str(value) for name, value in row.items()}
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return Measured(dict(sorted(rows.items())), failures)


def read_table(version: str) -> dict[Key, Row]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {_key(row): row for row in csv.DictReader(file) if row["triton_lang"] == version}


def write_table(rows: list[Row]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def complaints(measured: Mapping[Key, Row], table: Mapping[Key, Row]) -> Iterator[str]:
    """One line for each thing that breaks a rule, that is worse than the table says, or that either side lacks."""
    yield from broken_rules(measured)
    if len(measured) > MAX_ROWS:
        yield f"{len(measured)} rows; allowed: {MAX_ROWS} a version"
    for key in sorted({*measured, *table}):
        if key not in table:
            yield f"{name_of(key)}: no row in {TABLE.name}"
        elif key not in measured:
            yield f"{name_of(key)}: in {TABLE.name}, but there is no such case"
        else:
            yield from (f"{name_of(key)}: {what}" for what in _worse(measured[key], table[key]))


def _worse(have: Row, row: Row) -> Iterator[str]:
    for name, budget in {"registers": REGISTER_BUDGET, "spill_bytes": 0, "shared_bytes": SHARED_BUDGET}.items():
        if int(have[name]) > int(row[name]) + budget:
            yield f"{name} {have[name]}; the table has {row[name]}, of which {budget} more are allowed"
    for name in _HAVE_TO_STAY:
        if int(row[name]) > 0 and int(have[name]) == 0:
            yield f"{name} 0; the table has {row[name]}"
    if shallowest(have["buffers"]) < shallowest(row["buffers"]):
        yield f"buffers {have['buffers'] or 'none'}; the table has {row['buffers']}"


def _key(row: Row) -> Key:
    version, case, architecture = (row[name] for name in _KEY)
    return version, case, architecture


def _compile_share(version: str, share: int) -> None:
    """Every WORKERS-th case, as JSON lines."""
    import triton

    from tests.kernels.aot.compile import compile_launch

    assert triton.__version__ == version, f"got Triton-lang {triton.__version__}, wanted {version}"
    for index, (case, architecture, launch) in enumerate(_cases()):
        if index % WORKERS != share:
            continue
        row: dict[str, Any] = dict(zip(_KEY, (version, case, architecture), strict=True))
        try:
            row |= asdict(compile_launch(launch, architecture))
        except Exception as error:  # whatever the compiler raises is this case's result
            row["failure"] = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps(row), flush=True)


def _cases() -> Iterator[tuple[str, str, Any]]:
    """(module.case, architecture, launch) of every module in cases/."""
    from tests.kernels.aot import cases

    for module in pkgutil.iter_modules(cases.__path__):
        launches = importlib.import_module(f"{cases.__name__}.{module.name}").launches
        for architecture in SHARED_LIMIT:
            for name, launch in launches(architecture).items():
                case = f"{module.name}.{name}"
                if architecture not in _LEFT_OUT or not _ELEMENTWISE.match(case):
                    yield case, architecture, launch


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--worker"]:
        _compile_share(arguments[1], int(arguments[2]))
        return 0
    rows: list[Row] = []
    failures = []
    for version in VERSIONS:
        measured = measure(version)
        rows += measured.rows.values()
        failures += [*measured.failures, *broken_rules(measured.rows)]
        print(f"Triton-lang {version}: {len(measured.rows)} rows")
    print(*failures, sep="\n", file=sys.stderr, end="\n" if failures else "")
    if rows:
        write_table(rows)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
