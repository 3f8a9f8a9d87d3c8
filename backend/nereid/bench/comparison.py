"""What a benchmark prints: the machine's ceilings, and for each workload the engines beside each other. Pure.

Always holds: engines are compared within a group (weights of the same size), each with Nereid's of that group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from nereid.bench import tables
from nereid.bench.ceilings import Ceilings
from nereid.bench.contestants import Contestant
from nereid.bench.floors import WEIGHT_BITS, ModelSize, WeightBits, decode_step, prefill
from nereid.bench.records import Circumstances, Run
from nereid.bench.rounds import Outcome
from nereid.bench.workloads import Workload

_HEAD = (
    "engine", "output/s", "decode/s", "step ms", "prefill/s", "TTFT ms", "of floor: decode", "prefill",
    "nereid: output", "decode", "prefill", "same tokens", "others",
)  # fmt: skip
_OPEN_HEAD = (
    "engine", "output/s", "TTFT ms", "p99", "TPOT ms", "p99", "nereid: output", "TTFT", "TPOT", "others",
)  # fmt: skip
LEGEND = """\
output/s: output tokens a second, from the start to the last token. decode/s: those after all requests have their first.
prefill/s: prompt tokens a second until then. "of floor": the least time that this machine could take, by bytes and
operations and by what it could do just before, as a share of the time taken. "nereid": how many times as fast Nereid
is, the median of the ratios of single rounds. "same tokens": share of the output before it first differs from that of
the first engine. "others": share of the processor that anything else took (median); a run that others began to disturb
is done once more."""


def usual_ceilings(runs: Sequence[Run]) -> Ceilings:
    """The median of each."""
    return Ceilings(*(statistics.median(values) for values in _ceilings(runs)))


def _ceilings(runs: Sequence[Run]) -> list[tuple[float, ...]]:
    """By kind, as often as they were measured."""
    measured = {(run.round, run.workload): run.ceilings for run in runs}
    return list(zip(*map(astuple, measured.values()), strict=True))


def describe_machine(where: Circumstances, runs: Sequence[Run]) -> str:
    """Lines of the machine and what it could do at most, as a median and the range of what was measured."""
    names = ("reading", "GB/s"), ("float32 products", "GFLOP/s"), ("bfloat16 products", "GFLOP/s")
    told = [
        f"{name} {statistics.median(values) / 1e9:.0f} ({min(values) / 1e9:.0f} - {max(values) / 1e9:.0f}) {unit}"
        for (name, unit), values in zip(names, _ceilings(runs), strict=True)
    ]
    return f"{where}\nceilings: {'; '.join(told)}"


def describe_floors(size: ModelSize, ceilings: Ceilings, groups: Sequence[str]) -> str:
    """A table of the least times for the model, by format of its weights (EngineConfig's `quantization`)."""
    rows = []
    for group in groups:
        step = decode_step(size, WEIGHT_BITS[group], [0])
        first = prefill(size, WEIGHT_BITS[group], [2000])
        batch = decode_step(size, WEIGHT_BITS[group], [300] * 32)
        cells = (f"{work.floor_s(ceilings.machine) * 1e3:.1f}" for work in (step, batch, first))
        rows.append([group, f"{step.bytes / 1e6:.0f}", *cells])
    head = ("floors by quantization", "weights MB", "decode step ms", "32 at 300 tokens", "prefill of 2000 ms")
    return tables.table(head, rows)


def compare(workload: Workload, contestants: Sequence[Contestant], outcome: Outcome, size: ModelSize) -> str:
    """The table of one workload, medians over the rounds."""
    if workload.rate is not None:
        rows = [_open_row(workload, contestant, contestants, outcome) for contestant in contestants]
        return f"{_title(workload)}\n{tables.table(_OPEN_HEAD, rows)}"
    rows = [_row(workload, contestant, contestants, outcome, size) for contestant in contestants]
    return f"{_title(workload)}\n{tables.table(_HEAD, rows)}"


def _title(workload: Workload) -> str:
    arrivals = workload.arrivals
    prompts = sum(a.num_prompt_tokens for a in arrivals) / len(arrivals)
    outputs = sum(a.num_output_tokens for a in arrivals) / len(arrivals)
    return f"{workload.name}: {len(arrivals)} requests, {prompts:.0f} prompt and {outputs:.0f} output tokens on average"


def _row(
    workload: Workload, contestant: Contestant, contestants: Sequence[Contestant], outcome: Outcome, size: ModelSize
) -> list[str]:
    runs = tables.of(outcome.runs, contestant.name, workload.name)
    ours = tables.of(outcome.runs, _ours(contestant, contestants), workload.name)
    bits = WEIGHT_BITS[contestant.group]
    return [
        contestant.name,
        tables.number(tables.median(runs, lambda m: m.output_rate)),
        tables.number(tables.median(runs, lambda m: m.decode_rate)),
        tables.number(tables.median(runs, lambda m: m.step_s) * 1e3),
        tables.number(tables.median(runs, lambda m: m.prefill_rate), 0),
        tables.number(tables.median(runs, lambda m: m.ttft) * 1e3, 0),
        tables.share(statistics.median(_share_of_step(workload, bits, size, run) for run in runs)),
        tables.share(statistics.median(_share_of_prefill(workload, bits, size, run) for run in runs)),
        *(
            tables.number(_speed(ours, runs, contestant, figure), 2)
            for figure in (lambda m: m.output_rate, lambda m: m.decode_rate, lambda m: m.prefill_rate)
        ),
        tables.share(outcome.agreements.get((contestant.name, workload.name), math.nan)),
        tables.share(statistics.median(run.taken for run in runs)),
    ]


def _share_of_step(workload: Workload, bits: WeightBits, size: ModelSize, run: Run) -> float:
    """Of the time that a decode step took, half-way through the outputs, what the machine needed at least."""
    contexts = [a.num_prompt_tokens + a.num_output_tokens / 2 for a in workload.arrivals]
    return decode_step(size, bits, contexts).floor_s(run.ceilings.machine) / run.measures.step_s


def _share_of_prefill(workload: Workload, bits: WeightBits, size: ModelSize, run: Run) -> float:
    """Likewise of the prompts."""
    lengths = [a.num_prompt_tokens for a in workload.arrivals]
    least_s = prefill(size, bits, lengths).floor_s(run.ceilings.machine)
    return least_s * run.measures.prefill_rate / sum(lengths)


def _open_row(
    workload: Workload, contestant: Contestant, contestants: Sequence[Contestant], outcome: Outcome
) -> list[str]:
    runs = tables.of(outcome.runs, contestant.name, workload.name)
    ours = tables.of(outcome.runs, _ours(contestant, contestants), workload.name)
    times = (lambda m: m.ttft, lambda m: m.ttft_p99, lambda m: m.tpot, lambda m: m.tpot_p99)
    inverse = (lambda m: m.output_rate, lambda m: 1 / m.ttft, lambda m: 1 / m.tpot)
    return [
        contestant.name,
        tables.number(tables.median(runs, lambda m: m.output_rate)),
        *(tables.number(tables.median(runs, figure) * 1e3, 0) for figure in times),
        *(tables.number(_speed(ours, runs, contestant, figure), 2) for figure in inverse),
        tables.share(statistics.median(run.taken for run in runs)),
    ]


def _ours(contestant: Contestant, contestants: Sequence[Contestant]) -> str:
    """The name of Nereid's engine in this one's group; empty where it does not take part."""
    return next((c.name for c in contestants if c.is_ours and c.group == contestant.group), "")


def _speed(ours: Sequence[Run], runs: Sequence[Run], contestant: Contestant, figure: tables.Figure) -> float:
    return math.nan if contestant.is_ours else tables.median_ratio(ours, runs, figure)


def describe_parts(parts: Mapping[str, Mapping[str, float]]) -> str:
    """A table of what a step's parts take, for the workloads of which they are told."""
    told = {workload: times for workload, times in parts.items() if times}
    names = list(next(iter(told.values()), {}))
    rows = [[workload, *(tables.number(times[name], 2) for name in names)] for workload, times in told.items()]
    return tables.table(("ms of a step", *names), rows)
