"""`nereid bench engine`: Nereid's engine alone, against what the machine could do."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nereid.bench import contestants, threads, workloads
from nereid.bench.contestants import Contestant
from nereid.bench.measuring import measure_and_describe
from nereid.bench.prompts import PromptSource
from nereid.bench.worker_process import Worker
from nereid.bench.workloads import PROFILED, STEPS, WORKLOADS
from nereid.paths import Progress

_PROFILE_S = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The command's arguments. quantization: as in EngineConfig.  workloads: names; none: all.  profile: say where the
    time goes, too."""

    rounds: int
    quantization: str
    workloads: tuple[str, ...]
    csv: Path | None
    profile: bool


def bench_engine(options: EngineOptions, checkout: Path, say: Progress, contestant: Contestant | None = None) -> int:
    """Measure, and print the tables. contestant: another model than the usual. Raises NereidError and OSError."""
    asked = workloads.choose(options.workloads, (*WORKLOADS, *STEPS))
    chosen = (contestant or contestants.nereid(options.quantization),)

    def profiled(workers: Mapping[str, Worker], source: PromptSource) -> str:
        say("profiling")
        return _profile(workers[chosen[0].name], source, say)

    more = profiled if options.profile else None
    print(measure_and_describe(chosen, asked, options.rounds, options.csv, checkout, say, more))
    return 0


def _profile(worker: Worker, source: PromptSource, say: Progress) -> str:
    """The threads while 16 streams decode."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(worker.ask, PROFILED, source.prompts(PROFILED))
        found = threads.profile(worker.pid, _PROFILE_S, say)
        done.result()
    return f"{PROFILED.name}: where the time of {_PROFILE_S} s went\n{threads.describe(found)}"
