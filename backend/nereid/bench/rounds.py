"""Rounds: every engine in turn does the same workload, so that what else the machine does meets all alike.

Always holds: one engine computes at a time. All are loaded first and stay, but a worker that is not asked is stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from nereid.bench.ceilings import Ceilings, measure_ceilings
from nereid.bench.contestants import Contestant
from nereid.bench.measures import agreement, measure
from nereid.bench.prompts import PromptSource
from nereid.bench.quiet import QUIET, wait_until_quiet
from nereid.bench.records import RecordFile, Run
from nereid.bench.worker_process import Reply, Worker
from nereid.bench.workloads import WARM_UP, Workload
from nereid.paths import Progress


@dataclass(frozen=True, slots=True)
class Outcome:
    """runs: all of them.  agreements: by engine and workload, the share of tokens that it has in common with the first
    engine, in the first round.  parts: by workload, mean milliseconds of a step by part, in the last round of the first
    engine."""

    runs: Sequence[Run]
    agreements: Mapping[tuple[str, str], float]
    parts: Mapping[str, Mapping[str, float]]


@contextmanager
def loaded(contestants: Sequence[Contestant], source: PromptSource, say: Progress) -> Iterator[dict[str, Worker]]:
    """A worker for each, loaded and warm. Raises NereidError and OSError."""
    programs = [contestant.program(say) for contestant in contestants]
    with ExitStack() as stack:
        workers = {}
        for program in programs:
            say(f"loading {program.name}")
            workers[program.name] = stack.enter_context(Worker(program))
            workers[program.name].ask(WARM_UP, source.prompts(WARM_UP))
        yield workers


def run_rounds(
    workers: Mapping[str, Worker],
    workloads: Sequence[Workload],
    source: PromptSource,
    num_rounds: int,
    records: RecordFile,
    say: Progress,
) -> Outcome:
    """`num_rounds` times: for each workload, what the machine can do, and each engine in turn. Raises NereidError where
    an engine fails."""
    runs: list[Run] = []
    agreements: dict[tuple[str, str], float] = {}
    parts: dict[str, Mapping[str, float]] = {}
    for number in range(1, num_rounds + 1):
        for workload in workloads:
            replies: dict[str, Reply] = {}
            ceilings = measure_ceilings()
            for name, worker in workers.items():
                replies[name] = _ask_quietly(worker, workload, source)
                runs.append(_run(number, name, workload, replies[name], worker, ceilings))
                records.add(runs[-1])
                say(_line(runs[-1]))
            first = next(iter(replies.values()))
            parts[workload.name] = first.parts
            if number == 1:
                found = {(name, workload.name): agreement(first.answers, r.answers) for name, r in replies.items()}
                agreements |= found
    return Outcome(runs, agreements, parts)


def _ask_quietly(worker: Worker, workload: Workload, source: PromptSource) -> Reply:
    """Once more where it was quiet and others then took much of the processor; the reply from which they took less."""
    prompts = source.prompts(workload)
    is_quiet = wait_until_quiet()
    first = worker.ask(workload, prompts)
    if first.taken < QUIET or not is_quiet or not wait_until_quiet():
        return first
    return min(first, worker.ask(workload, prompts), key=lambda reply: reply.taken)


def _run(number: int, name: str, workload: Workload, reply: Reply, worker: Worker, ceilings: Ceilings) -> Run:
    versions = " ".join(f"{package}=={version}" for package, version in worker.versions.items())
    return Run(number, name, workload.name, measure(workload, reply.answers), versions, reply.taken, ceilings)


def _line(run: Run) -> str:
    speed = f"{run.measures.output_rate:8.1f} output tokens/s"
    return f"round {run.round}: {run.workload:13} {run.engine:14} {speed}; others took {run.taken:.0%}"
