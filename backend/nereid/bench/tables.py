"""Tables of text, and what stands in them: medians over rounds, and ratios taken round by round. Pure.

Always holds: a ratio of two engines is the median of the ratios of single rounds, in which both met the same state of
the machine; above 1 the first is faster. What was not measured is a dash.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from nereid.bench.measures import Measures
from nereid.bench.records import Run

Figure = Callable[[Measures], float]


def of(runs: Sequence[Run], engine: str, workload: str) -> list[Run]:
    """Those of one engine and workload, by round."""
    chosen = [run for run in runs if run.engine == engine and run.workload == workload]
    return sorted(chosen, key=lambda run: run.round)


def median(runs: Sequence[Run], figure: Figure) -> float:
    """Over the rounds; NaN where there is none, or the figure is none."""
    values = [value for run in runs if not math.isnan(value := figure(run.measures))]
    return statistics.median(values) if values else math.nan


def median_ratio(ours: Sequence[Run], theirs: Sequence[Run], figure: Figure) -> float:
    """Median over the rounds that both have of ours / theirs; NaN where there is none."""
    by_round = {run.round: figure(run.measures) for run in theirs}
    ratios = [figure(run.measures) / by_round[run.round] for run in ours if by_round.get(run.round)]
    ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
    return statistics.median(ratios) if ratios else math.nan


def number(value: float, digits: int = 1, unit: str = "") -> str:
    """A cell; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}{unit}"


def share(value: float) -> str:
    """A cell: per cent; a dash for NaN."""
    return number(value * 100, 0, " %")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
