"""A whole measurement: the machine's limits, the rounds, and what is printed of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nereid.bench.ceilings import measure_ceilings
from nereid.bench.comparison import LEGEND, compare, describe_floors, describe_machine, describe_parts
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
    """Ceilings, floors, all rounds; what is to be printed of them, with what `more` has to say of the loaded workers.

    chosen: all of the same model. Raises NereidError and OSError.
    """
    directory = chosen[0].directory(say)
    source = PromptSource.of_project(checkout, directory)
    size = ModelSize.of(ModelConfig.load(directory))
    say("measuring the machine's ceilings")
    where, ceilings = circumstances(checkout), measure_ceilings()
    records = RecordFile(csv, where)
    say(f"\n{describe_machine(where, ceilings)}\n")
    with loaded(chosen, source, say) as workers:
        loads = ", ".join(f"{name} {worker.load_s:.1f} s" for name, worker in workers.items())
        outcome = run_rounds(workers, asked, source, num_rounds, records, say)
        last = [more(workers, source)] if more else []
    say("measuring the machine's ceilings again")
    ceilings = ceilings.best_with(measure_ceilings())
    groups = tuple(dict.fromkeys(contestant.group for contestant in chosen))
    head = [describe_machine(where, ceilings), describe_floors(size, ceilings, groups), f"loading: {loads}"]
    found = [compare(workload, chosen, outcome, size, ceilings) for workload in asked]
    return "\n\n".join(["", *head, *found, *_parts(outcome), *last, LEGEND])


def _parts(outcome: Outcome) -> list[str]:
    return [describe_parts(outcome.parts)] if any(outcome.parts.values()) else []
