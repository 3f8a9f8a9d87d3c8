"""A whole measurement: the machine's limits, the rounds, and what is printed of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nereid.bench.comparison import (
    LEGEND,
    compare,
    describe_floors,
    describe_machine,
    describe_parts,
    usual_ceilings,
)
from nereid.bench.contestants import Contestant
from nereid.bench.floors import ModelSize
from nereid.bench.prompts import PromptSource
from nereid.bench.records import RecordFile, circumstances
from nereid.bench.rounds import Outcome, loaded, run_rounds
from nereid.bench.worker_process import Worker
from nereid.bench.workloads import Workload
from nereid.model_config import ModelConfig
from nereid.paths import Progress

More = Callable[[Mapping[str, Worker], PromptSource], str]


def measure_and_describe(
    chosen: Sequence[Contestant],
    asked: Sequence[Workload],
    num_rounds: int,
    csv: Path | None,
    checkout: Path,
    say: Progress,
    more: More | None = None,
) -> str:
    """All rounds; what is to be printed of them, with what `more` has to say of the loaded workers.

    chosen: all of the same model. Raises NereidError and OSError.
    """
    directory = chosen[0].directory(say)
    source = PromptSource.of_project(checkout, directory)
    size = ModelSize.of(ModelConfig.load(directory))
    where = circumstances(checkout)
    records = RecordFile(csv, where)
    say(f"\n{where}\n")
    with loaded(chosen, source, say) as workers:
        loads = ", ".join(f"{name} {worker.load_s:.1f} s" for name, worker in workers.items())
        outcome = run_rounds(workers, asked, source, num_rounds, records, say)
        last = [more(workers, source)] if more else []
    groups = tuple(dict.fromkeys(contestant.group for contestant in chosen))
    machine = describe_machine(where, outcome.runs)
    head = [machine, describe_floors(size, usual_ceilings(outcome.runs), groups), f"loading: {loads}"]
    found = [compare(workload, chosen, outcome, size) for workload in asked]
    return "\n\n".join(["", *head, *found, *_parts(outcome), *last, LEGEND])


def _parts(outcome: Outcome) -> list[str]:
    return [describe_parts(outcome.parts)] if any(outcome.parts.values()) else []
