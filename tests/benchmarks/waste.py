"""Slots that are allocated and hold no token, under Azure's trace of conversations, unscaled; the allocator alone.

    .venv/bin/python tests/benchmarks/waste.py ../shared/data/azure_conv.csv

Requests come at the trace's times. A prompt is computed at once when it comes; then a token comes every tick of 50 ms
(20 tokens a second for each request), until the trace's output is there. At every tick the slots of all allocated
blocks and the tokens in them are counted; the waste is one less the ratio of the sums. Beside it: what is wasted where
each request reserves as many slots as the longest one of the trace, or as its own prompt and the longest output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nereid.bench.replay import TracedLengths, azure  # noqa: E402
from nereid.kv_cache.layout import BlockLayout  # noqa: E402
from nereid.kv_cache.manager import KVCacheManager  # noqa: E402
from nereid.kv_cache.matching import Match  # noqa: E402
from tests.benchmarks.traces import BLOCK  # noqa: E402

_TICK_S = 0.05
_GOAL = 0.01


@dataclass(slots=True)
class _Growing:
    """A request's known tokens, of which only the number matters here."""

    traced: TracedLengths
    num_tokens: int

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(range(start, stop))


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of slots without a token: in blocks, and where slots are reserved by the longest request or output."""

    paged: float
    by_longest_request: float
    by_longest_output: float


def waste(requests: Sequence[TracedLengths]) -> Waste:
    most_output = max(request.num_output_tokens for request in requests)
    most = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    num_blocks = sum(-(-(r.num_prompt_tokens + r.num_output_tokens) // BLOCK) for r in requests) + 1
    kv_cache = KVCacheManager(num_blocks, BlockLayout(BLOCK))
    running: dict[int, _Growing] = {}
    tokens = slots = reserved = reserved_by_output = 0
    next_id, tick = 0, 0
    while next_id < len(requests) or running:
        if not running:
            tick = max(tick, int(requests[next_id].at / _TICK_S))
        while next_id < len(requests) and requests[next_id].at <= tick * _TICK_S:
            growing = running[next_id] = _Growing(requests[next_id], 0)
            kv_cache.admit(next_id, None, growing, Match())
            next_id += 1
        for request_id, growing in list(running.items()):
            before = growing.num_tokens
            growing.num_tokens = before + 1 if before else growing.traced.num_prompt_tokens
            if growing.num_tokens > growing.traced.num_prompt_tokens + growing.traced.num_output_tokens:
                kv_cache.free(request_id)
                del running[request_id]
            else:
                kv_cache.grow(request_id, before, growing.num_tokens)
        tokens += sum(growing.num_tokens for growing in running.values())
        slots += (kv_cache.num_blocks - kv_cache.num_free_blocks) * BLOCK
        reserved += most * len(running)
        reserved_by_output += sum(growing.traced.num_prompt_tokens + most_output for growing in running.values())
        tick += 1
    return Waste(1 - tokens / slots, 1 - tokens / reserved, 1 - tokens / reserved_by_output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="azure_conv.csv: AzureLLMInferenceTrace_conv of AzurePublicDataset")
    parser.add_argument("--requests", type=int, help="the first so many alone")
    options = parser.parse_args()
    found = waste(azure(options.trace)[: options.requests])
    print("layout,wasted share of slots")
    print(f"blocks of {BLOCK},{found.paged:.4f}")
    print(f"in one piece, as many as the longest request,{found.by_longest_request:.4f}")
    print(f"in one piece, own prompt and the longest output,{found.by_longest_output:.4f}")
    if found.paged > _GOAL:
        print(f"MISSED: more than {_GOAL:.0%} of the slots in blocks")
    return int(found.paged > _GOAL)


if __name__ == "__main__":
    sys.exit(main())
