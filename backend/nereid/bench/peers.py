"""`nereid bench peers`: Nereid's engine and others on the same requests, in turn, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid.bench import contestants, workloads
from nereid.bench.ceilings import measure_ceilings
from nereid.bench.comparison import LEGEND, compare, describe_floors, describe_machine, describe_parts
from nereid.bench.contestants import Contestant, model_directory
from nereid.bench.floors import ModelSize
from nereid.bench.prompts import PromptSource
from nereid.bench.records import RecordFile, circumstances
from nereid.bench.replay import RATES, read_trace, replay
from nereid.bench.rounds import Outcome, loaded, run_rounds
from nereid.bench.workloads import REPLAY, Workload
from nereid.errors import ConfigError
from nereid.model_config import ModelConfig
from nereid.paths import Progress

_TEXT = "LICENSE"
"""English that stays as it is; prompts are cut out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    """The command's arguments. engines, workloads: names; none of them: the usual ones.  trace: for `replay`."""

    rounds: int
    engines: tuple[str, ...]
    workloads: tuple[str, ...]
    csv: Path | None
    trace: Path | None


def bench_peers(options: PeersOptions, checkout: Path, say: Progress) -> int:
    """Measure, and print the tables. Raises NereidError and OSError."""
    chosen = contestants.choose(options.engines)
    asked = _workloads(options)
    print(measure_and_describe(chosen, asked, options.rounds, options.csv, checkout, say))
    if not options.trace and (not options.workloads or REPLAY in options.workloads):
        print("\nreplay: left out, since no --trace was given")
    return 0


def _workloads(options: PeersOptions) -> tuple[Workload, ...]:
    """Raises ConfigError."""
    fixed = workloads.choose(options.workloads)
    if options.workloads and REPLAY not in options.workloads:
        return fixed
    if options.trace is None:
        if REPLAY in options.workloads and not fixed:
            raise ConfigError(f"--workloads: {REPLAY} needs --trace FILE, Azure's trace of conversations")
        return fixed
    trace = read_trace(options.trace)
    return (*fixed, *(replay(trace, rate) for rate in RATES))


def measure_and_describe(
    chosen: Sequence[Contestant],
    asked: Sequence[Workload],
    num_rounds: int,
    csv: Path | None,
    checkout: Path,
    say: Progress,
) -> str:
    """Ceilings, floors, all rounds; what is to be printed of them. Raises NereidError and OSError."""
    directory = model_directory(say)
    source = PromptSource.of(checkout / _TEXT, directory)
    size = ModelSize.of(ModelConfig.load(directory))
    say("measuring the machine's ceilings")
    where, ceilings = circumstances(checkout), measure_ceilings()
    records = RecordFile(csv, where, ceilings)
    groups = tuple(dict.fromkeys(contestant.group for contestant in chosen))
    head = [describe_machine(where, ceilings), describe_floors(size, ceilings, groups)]
    say("\n\n".join(["", *head, ""]))
    with loaded(chosen, source, say) as workers:
        loads = ", ".join(f"{name} {worker.load_s:.1f} s" for name, worker in workers.items())
        outcome = run_rounds(workers, asked, source, num_rounds, records, say)
    found = [compare(workload, chosen, outcome, size, ceilings) for workload in asked]
    return "\n\n".join(["", *head, f"loading: {loads}", *found, *_parts(outcome), LEGEND])


def _parts(outcome: Outcome) -> list[str]:
    return [describe_parts(outcome.parts)] if any(outcome.parts.values()) else []
