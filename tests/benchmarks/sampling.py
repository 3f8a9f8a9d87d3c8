"""Milliseconds that the sampler takes for a batch of logits, by what its requests ask for.

    .venv/bin/python tests/benchmarks/sampling.py --rounds 50

The cases run in turn, each beside a plain `logits.max(dim=1)` over the same batch, so that both meet the same state of
the machine; ratios are medians of the pairs. Prints a table, and the goals where one is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nereid.request import SamplingParams  # noqa: E402
from tests.unit.draws import Draws  # noqa: E402

_GOALS_MS = {"greedy": 1.5, "top-k 50, top-p 0.9": 4.0}
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.1": SamplingParams(min_p=0.1),
    "temperature": SamplingParams(temperature=0.8),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5),
    "greedy, 300 biases": SamplingParams(temperature=0.0, logit_bias=tuple((i, 1.0) for i in range(300))),
    "greedy, logprobs 0": SamplingParams(temperature=0.0, logprobs=0),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}


def make_logits(rows: int, vocab: int) -> torch.Tensor:
    """As of a language model: most tokens far below a few, whose shares fall off as a power of their rank."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
    return -1.6 * (ranks + 1).float().log() + 0.1 * torch.randn(rows, vocab, generator=generator)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each request's prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    original = make_logits(args.rows, args.vocab)
    logits = original.clone()
    prompt = torch.randint(0, args.vocab, (args.prompt,)).tolist()
    draws = {name: Draws(args.vocab, *[case] * args.rows, prompt=prompt) for name, case in CASES.items()}
    times: dict[str, list[float]] = {name: [] for name in CASES}
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(-3, args.rounds):  # three to warm up
        for name, batch in draws.items():
            plain = seconds(lambda: original.max(dim=1))
            logits.copy_(original)
            taken = seconds(lambda: batch.next(logits, copy=False))  # noqa: B023
            if number >= 0:
                times[name].append(taken * 1e3)
                ratios[name].append(taken / plain)
    print(f"{args.rows} rows of {args.vocab}, {args.threads} threads, {args.rounds} rounds\n")
    print(f"{'case':22} {'median ms':>10} {'least ms':>10} {'times a max':>12}")
    for name in CASES:
        own, ratio = times[name], statistics.median(ratios[name])
        print(f"{name:22} {statistics.median(own):10.2f} {min(own):10.2f} {ratio:12.2f}")
    missed = [name for name, goal in _GOALS_MS.items() if statistics.median(times[name]) > goal]
    for name in missed:
        print(f"\n{name}: over {_GOALS_MS[name]} ms")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
