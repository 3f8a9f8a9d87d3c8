"""TTFT, ITL, TPOT and throughput from perf_analyzer's profile export, whose own reports have none of them.

    .venv/bin/python client_examples/load/figures.py profile_export.json

A response counts for as many tokens as its num_output_tokens says, and for one where it does not say.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_NS_PER_MS = 1e6
_NS_PER_S = 1e9
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request with its responses: when each came, in ns, and how many tokens it brought."""

    sent: int
    received: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """One level of load. Times in ms: ttft, tpot and latency one a request, itl one a gap between two responses.

    tpot: the mean time of a token after the first response. duration_s: from the first request to the last response.
    lone_tokens: of output_tokens, those that came in a response of their own.
    """

    load: str
    requests: int
    unanswered: int
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    tpot: tuple[float, ...]
    latency: tuple[float, ...]
    output_tokens: int
    lone_tokens: int
    duration_s: float


def read_export(path: Path) -> list[Figures]:
    """The figures of each level of load in the file. Raises ValueError where it is no profile export."""
    try:
        return [_figures(experiment) for experiment in json.loads(path.read_text("utf-8"))["experiments"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no profile export of perf_analyzer ({error})") from error


def _figures(experiment: Mapping[str, Any]) -> Figures:
    load = experiment["experiment"]
    answers = [_answer(request) for request in experiment["requests"]]
    answered = [answer for answer in answers if answer.received]
    last = max((answer.received[-1] for answer in answered), default=0)
    first = min((answer.sent for answer in answered), default=0)
    return Figures(
        load=f"{load['mode'].replace('_', ' ')} {load['value']}",
        requests=len(answered),
        unanswered=len(answers) - len(answered),
        ttft=tuple((answer.received[0] - answer.sent) / _NS_PER_MS for answer in answered),
        itl=tuple((later - sooner) / _NS_PER_MS for a in answered for sooner, later in pairwise(a.received)),
        tpot=tuple(_tpot(answer) for answer in answered if sum(answer.tokens[1:])),
        latency=tuple((answer.received[-1] - answer.sent) / _NS_PER_MS for answer in answered),
        output_tokens=sum(sum(answer.tokens) for answer in answered),
        lone_tokens=sum(answer.tokens.count(1) for answer in answered),
        duration_s=(last - first) / _NS_PER_S,
    )


def _answer(request: Mapping[str, Any]) -> Answer:
    times = request["response_timestamps"]
    outputs = request.get("response_outputs") or [{}] * len(times)
    if outputs and _is_empty(outputs[-1]):
        times, outputs = times[:-1], outputs[:-1]
    return Answer(request["timestamp"], tuple(times), tuple(_count(output) for output in outputs))


def _is_empty(output: Mapping[str, Any]) -> bool:
    """Whether a response only marks the end: some servers send one after the last token. (Where no outputs were
    recorded there is nothing to tell it by.)"""
    return output.get("text_output", output.get("response")) == "" and output.get("num_output_tokens") in (None, "", 0)


def _count(output: Mapping[str, Any]) -> int:
    tokens = output.get("num_output_tokens")
    return 1 if tokens in (None, "") else int(tokens)


def _tpot(answer: Answer) -> float:
    return (answer.received[-1] - answer.received[0]) / _NS_PER_MS / sum(answer.tokens[1:])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that `percent` % of them do not exceed (nearest rank); NaN where there are none."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1] if values else math.nan


def table(figures: Figures) -> str:
    """Lines to print."""
    lines = [f"{figures.load}: {figures.requests} requests, {figures.unanswered} without an answer"]
    lines.append(f"{'':22}{'mean':>10}" + "".join(f"{f'p{percent}':>10}" for percent in _PERCENTILES))
    rows = {"TTFT (ms)": figures.ttft, "ITL (ms)": figures.itl, "TPOT (ms)": figures.tpot}
    for name, values in {**rows, "request latency (ms)": figures.latency}.items():
        mean = sum(values) / len(values) if values else math.nan
        shown = (mean, *(percentile(values, percent) for percent in _PERCENTILES))
        lines.append(f"{name:22}" + "".join(f"{value:10.1f}" for value in shown))
    per_s = 1 / figures.duration_s if figures.duration_s else math.nan
    lines.append(f"{'output tokens/s':22}{figures.output_tokens * per_s:10.2f}")
    lines.append(f"{'requests/s':22}{figures.requests * per_s:10.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="the file of --profile-export-file")
    parser.add_argument("--json", action="store_true", help="every value, as a list with an object for each level")
    options = parser.parse_args()
    try:
        levels = read_export(options.export)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(level) for level in levels]))
    else:
        print("\n" + "\n\n".join(map(table, levels)))
    return 0 if levels and all(level.requests for level in levels) else 1


if __name__ == "__main__":
    sys.exit(main())
