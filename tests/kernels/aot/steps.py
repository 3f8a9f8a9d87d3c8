"""What changes from one step to the next, for each operation: nothing of it may have a kernel compiled anew.

Triton-lang compiles a kernel for each combination of dtypes, constexpr values, and properties of numbers (1, a multiple
of 16, more than 32 bits) and pointers (None, aligned); a server that meets a new one stalls for seconds.
`python -m tests.kernels.aot.steps` says which kernels STEPS compile more than once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from nereid_kernels.workloads import WORKLOADS, Make, layers, sampling
from tests.kernels.aot.compile import TARGETS, specialisation

ROWS = (1, 2, 16, 300)  # what Triton-lang would tell apart, were it allowed to
SEQS = (1, 3, 16)

STEPS: Mapping[str, tuple[Make, Mapping[str, Sequence[int]]]] = MappingProxyType(
    {
        "rms_norm": (layers.add_rms_norm, {"rows": ROWS, "width": (4096,)}),
        "matmul": (layers.matmul, {"rows": ROWS}),
        "matmul_int8": (layers.matmul_int8, {"rows": ROWS}),
        "matmul_int4": (layers.matmul_int4, {"rows": ROWS}),
        "gated_activation": (layers.gated_activation, {"rows": ROWS, "width": (14336,)}),
        "kv_write": (layers.kv_write, {"tokens": ROWS}),
        "qk_norm_rope_kv_write": (layers.qk_norm_rope_kv_write, {"tokens": ROWS}),
        # Short queries have a tile of 16, 32 or 64 rows, by the longest of them: one configuration each.
        **{
            f"paged_attention, queries up to {lengths[-1]}": (
                layers.paged_attention,
                {"seqs": SEQS, "query_len": lengths, "seq_len": (16, 500, 4096)},
            )
            for lengths in ((1, 2, 4), (5, 8), (9, 16), (17, 300))
        },
        "paged_attention with sink tokens": (
            partial(layers.paged_attention, window=200, num_sink_tokens=4),
            {"seqs": SEQS, "query_len": (1, 2, 4, 17, 300), "seq_len": (16, 500, 4096)},
        ),
        "mla_attention": (
            layers.mla_attention,
            {"seqs": SEQS, "query_len": (1, 2, 8, 16, 17, 300), "seq_len": (16, 500, 4096)},
        ),
        "copy_blocks": (layers.copy_blocks, {"blocks": ROWS}),
        "gather_blocks": (layers.gather_blocks, {"blocks": ROWS}),
        "scatter_blocks": (layers.scatter_blocks, {"blocks": ROWS}),
        "sample": (sampling.sample, {"rows": ROWS, "temperature": (0, 1), "top_p": (1,)}),
        "penalties": (sampling.penalties, {"rows": ROWS}),
        "bias": (sampling.apply_bias, {"rows": ROWS, "entries": (1, 3, 16)}),
        "grammar_mask": (sampling.grammar_mask, {"rows": ROWS}),
        "verify_draft": (sampling.verify_draft, {"seqs": SEQS, "draft_len": (1, 3, 4, 7, 15)}),
        "verify_coupled": (sampling.verify_coupled, {"seqs": SEQS, "draft_len": (1, 3, 4, 7, 15)}),
        "verify_tree": (sampling.verify_tree, {"seqs": SEQS, "nodes": (1, 2, 15, 16, 40)}),
    }
)
"""Launches, and the numbers that they are asked for with, in all combinations. What a deployment fixes stays."""


def complaints(architecture: str) -> Iterator[str]:
    """One line for each kernel that is compiled more than once, and for each workload that is not among STEPS."""
    for step, (make, numbers) in STEPS.items():
        for name, ways in compiled(make, numbers, architecture).items():
            if len(ways) > 1:
                yield f"{step} on {architecture}: {name} is compiled {len(ways)} times, for {', '.join(ways.values())}"
    for (operation, shape), workload in WORKLOADS.items():
        if workload.func not in [make for make, _ in STEPS.values()]:
            yield f"{operation} {shape} is not among STEPS"
    if len(compiled(layers.add_rms_norm, {"rows": (1,), "width": (2048, 4096)}, architecture)["rms_norm"]) != 2:
        yield "a constexpr that changes is not noticed"


def compiled(make: Make, numbers: Mapping[str, Sequence[int]], architecture: str) -> dict[str, dict[str, str]]:
    """kernel -> specialisation -> the numbers that have it first"""
    found: dict[str, dict[str, str]] = {}
    for chosen in itertools.product(*numbers.values()):
        asked = dict(zip(numbers, chosen, strict=True))
        for launch in make(torch.device("meta"), architecture, **asked):
            half = f" SHORT={launch.arguments['SHORT']}" if "SHORT" in launch.arguments else ""  # one step has both
            ways = found.setdefault(launch.name + half, {})
            ways.setdefault(specialisation(launch, architecture), str(asked))
    return found


def main() -> int:
    found = [line for architecture in TARGETS for line in complaints(architecture)]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
