"""What the compiled code has to be, whatever the committed table says: a table that is written anew must not break it.

Each exception is named with its figure and its reason. Always holds: this module imports no Triton-lang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

Key = tuple[str, str, str]
"""(version of Triton-lang, case, architecture)"""
Row = Mapping[str, str]

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
_PIPELINED = ("sm_80", "sm_90", "sm_100", "sm_120")
_ATTENTION = re.compile(r"(paged|mla)_attention\.(?!reduc)")
_PREFILL = re.compile(r".*\.prefill_(bf16|fp16)_")
_BUFFERS = 2  # of keys and values each: one is loaded while the other is multiplied

_WINDOW = "bounds of a window take registers that the tiles need; a narrower tile halves the matrix products' size"
_NEWEST_MLA = "the newest version alone: sums of 512 columns for 64 rows fill the registers; the pinned one spills none"
SPILLS: Mapping[Key, tuple[int, str]] = MappingProxyType(
    {
        ("3.6.0", "sample.sample", "gfx942"): (8, "16 sums of float64; fewer warps or wider tiles spill more"),
        ("3.6.0", "paged_attention.prefill_bf16_d128_g4_window", "gfx942"): (92, _WINDOW),
        ("3.9.0", "paged_attention.prefill_bf16_d128_g4_window", "gfx942"): (104, _WINDOW),
        ("3.6.0", "paged_attention.prefill_bf16_d128_g4_sink_tokens", "gfx942"): (92, _WINDOW),
        ("3.9.0", "paged_attention.prefill_bf16_d128_g4_sink_tokens", "gfx942"): (144, _WINDOW),
        ("3.9.0", "paged_attention.tree_bf16_d128_g4", "gfx942"): (
            20,
            "int64 ancestors; the pinned version spills none",
        ),
        ("3.9.0", "mla_attention.decode_bf16_128", "sm_90"): (236, _NEWEST_MLA),
        ("3.9.0", "mla_attention.prefill_bf16_128", "sm_90"): (180, _NEWEST_MLA),
    }
)
"""The most bytes that a case may spill, and why; all others none."""

_NEWEST_BUFFERS = "the newest version alone, whose buffers are 2 1; the pinned one has 4 2"
SINGLE_BUFFERED: Mapping[Key, str] = MappingProxyType(
    {
        ("3.9.0", "mla_attention.decode_bf16_128", "sm_100"): _NEWEST_BUFFERS,
        ("3.9.0", "mla_attention.prefill_bf16_128", "sm_100"): _NEWEST_BUFFERS,
    }
)
"""Attention with fewer buffers, and why."""


def shallowest(buffers: str) -> int:
    return min(map(int, buffers.split()), default=0)


def broken_rules(rows: Mapping[Key, Row]) -> Iterator[str]:
    for key, row in rows.items():
        yield from (f"{name_of(key)}: {what}" for what in _broken(key, row))


def name_of(key: Key) -> str:
    return f"{key[1]} on {key[2]} with Triton-lang {key[0]}"


def _broken(key: Key, row: Row) -> Iterator[str]:
    _, case, architecture = key
    if int(row["shared_bytes"]) > SHARED_LIMIT[architecture]:
        yield f"shared_bytes {row['shared_bytes']}; the target has {SHARED_LIMIT[architecture]}"
    allowed = SPILLS.get(key, (0, ""))[0]
    if int(row["spill_bytes"]) > allowed:
        yield f"spill_bytes {row['spill_bytes']}; allowed: {allowed}"
    if architecture == "sm_90" and _PREFILL.match(case) and int(row["wgmma"]) == 0:
        yield "wgmma 0; at least: 1"
    if architecture in _PIPELINED and _ATTENTION.match(case):
        if shallowest(row["buffers"]) < _BUFFERS and key not in SINGLE_BUFFERED:
            yield f"buffers {row['buffers'] or 'none'}; each at least: {_BUFFERS}"
        if int(row["async_copies"]) + int(row["tma_loads"]) == 0:
            yield "no asynchronous loads of 16 bytes a thread, nor by TMA"
