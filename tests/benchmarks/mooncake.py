"""Share of prompt tokens that the prefix cache finds in Mooncake's conversation trace, by the size of the cache.

    .venv/bin/python tests/benchmarks/mooncake.py ../shared/data/mooncake_conversation.jsonl --plot hits.svg

Through the scheduler and the allocator alone, without a model. One block of the trace becomes one of 16 tokens. Prints
CSV: blocks of the pool (0: more than are ever needed), prompt tokens, tokens found, rate; and what an ideal cache of
full blocks without bounds would find.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import log10
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.traces import BLOCK, hits, ideal_hits, mooncake  # noqa: E402

_SIZES = (5_000, 10_000, 20_000, 40_000, 80_000, 160_000)
_WIDTH, _HEIGHT, _MARGIN = 640, 360, 50


def format_plot(points: Sequence[tuple[int, float]], ideal: float) -> str:
    """An SVG drawing of rates over the sizes of the cache, on a logarithmic axis; the ideal is a dashed line."""
    low, high = log10(points[0][0]), log10(points[-1][0])

    def place(size: float, rate: float) -> tuple[float, float]:
        x = _MARGIN + (log10(size) - low) / (high - low) * (_WIDTH - 2 * _MARGIN)
        return x, _HEIGHT - _MARGIN - rate * (_HEIGHT - 2 * _MARGIN)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-size="11">']
    left, right = place(points[0][0], ideal), place(points[-1][0], ideal)
    parts.append(f'<path d="M{left[0]:.0f} {left[1]:.1f}H{right[0]:.0f}" stroke="gray" stroke-dasharray="4"/>')
    parts.append(f'<text x="{_MARGIN}" y="{left[1] - 6:.1f}">ideal, full blocks: {ideal:.1%}</text>')
    line = " ".join("{:.1f},{:.1f}".format(*place(size, rate)) for size, rate in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="black"/>')
    for size, rate in points:
        x, y = place(size, rate)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/><text x="{x - 14:.1f}" y="{y + 16:.1f}">{rate:.0%}</text>'
        )
        parts.append(f'<text x="{x - 18:.1f}" y="{_HEIGHT - _MARGIN + 16}">{size:,}</text>')
    parts.append(f'<text x="{_WIDTH / 2 - 70}" y="{_HEIGHT - 10}">blocks of {BLOCK} tokens in the pool</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl, of the Mooncake project")
    parser.add_argument("--requests", type=int, help="the first so many alone")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    requests = list(mooncake(options.trace))[: options.requests]
    ideal = ideal_hits(requests)
    enough = sum(-(-(len(r.prompt) + r.num_output_tokens) // BLOCK) for r in requests) + 2
    print("blocks,prompt_tokens,found_tokens,rate")
    points = []
    for size in [*(size for size in _SIZES if size < enough), enough]:
        found = hits(requests, size)
        points.append((size, found.rate))
        print(f"{0 if size == enough else size},{found.num_tokens},{found.num_found},{found.rate:.4f}", flush=True)
    print(f"ideal,{ideal.num_tokens},{ideal.num_found},{ideal.rate:.4f}")
    if options.plot:
        options.plot.write_text(format_plot(points, ideal.rate), "utf-8")
    missed = points[-1][1] < ideal.rate - 0.02
    if missed:
        print("MISSED: the rate without bounds is more than 2 points below the ideal one")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
