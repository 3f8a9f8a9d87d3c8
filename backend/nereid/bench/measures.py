"""Figures of one run, from when each request was sent and when its tokens came. Pure.

Always holds: decoding is measured where nothing else goes on: after the last request's first token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nereid.bench.worker_loop import Answer
from nereid.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Measures:
    """Times in seconds; rates in tokens a second; NaN where there is nothing to measure.

    seconds: from the start to the last token.  prefill_rate: prompt tokens until all requests have their first token.
    decode_rate: tokens after that, until the first request is done.  step_s: what a decode step took, from it.
    ttft, tpot: median over the requests, of the time to the first token and of the mean time of one after it.
    ttft_p99, tpot_p99: the value that 99 % of them do not exceed.
    """

    seconds: float
    output_tokens: int
    output_rate: float
    prefill_rate: float
    decode_rate: float
    step_s: float
    ttft: float
    ttft_p99: float
    tpot: float
    tpot_p99: float


def measure(workload: Workload, answers: Sequence[Answer]) -> Measures:
    """answers: as `worker_loop.run_job` gives them, for the requests of `workload`."""
    seconds = max(answer.at[-1] for answer in answers)
    output_tokens = sum(sum(answer.counts) for answer in answers)
    all_started = max(answer.at[0] for answer in answers)
    ttfts = [answer.at[0] - answer.sent for answer in answers]
    tpots = [tpot for answer in answers if not math.isnan(tpot := _tpot(answer))]
    decode_rate = math.nan if workload.rate else _decode_rate(answers, all_started)
    return Measures(
        seconds=seconds,
        output_tokens=output_tokens,
        output_rate=output_tokens / seconds,
        prefill_rate=math.nan if workload.rate else sum(a.num_prompt_tokens for a in workload.arrivals) / all_started,
        decode_rate=decode_rate,
        step_s=len(answers) / decode_rate,
        ttft=statistics.median(ttfts),
        ttft_p99=percentile(ttfts, 99),
        tpot=statistics.median(tpots) if tpots else math.nan,
        tpot_p99=percentile(tpots, 99),
    )


def _tpot(answer: Answer) -> float:
    later = sum(answer.counts[1:])
    return (answer.at[-1] - answer.at[0]) / later if later else math.nan


def _decode_rate(answers: Sequence[Answer], start: float) -> float:
    """Tokens a second while all requests decode; NaN where they do not."""
    end = min(answer.at[-1] for answer in answers)
    if end <= start:
        return math.nan
    pairs = (pair for answer in answers for pair in zip(answer.at, answer.counts, strict=True))
    return sum(count for at, count in pairs if start < at <= end) / (end - start)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that `percent` % of them do not exceed (nearest rank); NaN where there are none."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1] if values else math.nan


def agreement(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Share of tokens up to where two engines' outputs of the same requests first differ.

    Greedy, on the same weights, they part where two tokens are nearly equally good: early where one of them computes
    another model.
    """
    same = total = 0
    for our, their in zip(ours, theirs, strict=True):
        tokens = list(zip(our.token_ids, their.token_ids, strict=True))
        total += len(tokens)
        same += next((i for i, (a, b) in enumerate(tokens) if a != b), len(tokens))
    return same / total
