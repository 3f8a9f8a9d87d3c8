"""`nereid bench peers`: Nereid's engine and others on the same requests, in turn, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nereid.bench import contestants, workloads
from nereid.bench.measuring import measure_and_describe
from nereid.bench.replay import RATES, read_trace, replay
from nereid.bench.workloads import REPLAY, WORKLOADS, Workload
from nereid.errors import ConfigError
from nereid.paths import Progress


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
    if not options.trace and not options.workloads:
        print("\nreplay: left out, since no --trace was given")
    return 0


def _workloads(options: PeersOptions) -> tuple[Workload, ...]:
    """Raises ConfigError."""
    asked = [name for name in options.workloads if name != REPLAY]
    fixed = workloads.choose(asked, WORKLOADS, (REPLAY,)) if asked or not options.workloads else ()
    if REPLAY in options.workloads and options.trace is None:
        raise ConfigError(f"--workloads: {REPLAY} needs --trace FILE, Azure's trace of conversations")
    if options.trace is None or (options.workloads and REPLAY not in options.workloads):
        return fixed
    trace = read_trace(options.trace)
    return (*fixed, *(replay(trace, rate) for rate in RATES))
