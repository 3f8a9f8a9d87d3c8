"""Every kernel, compiled ahead of time for GPUs that are not at hand, is as good as the committed table says.

And as good as rules that no new table can change; and a step's numbers have none of them compiled anew.

A new table after a change that is meant: python -m tests.kernels.aot.table
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.aot.rules import SINGLE_BUFFERED, SPILLS, Row, broken_rules
from tests.kernels.aot.table import REGISTER_BUDGET, complaints, measure, read_table
from tests.kernels.triton_lang_versions import ROOT, VERSIONS, environment

KEY = ("3.6.0", "op.case", "sm_90")
ROW = {
    "triton_lang": KEY[0],
    "case": KEY[1],
    "architecture": KEY[2],
    "registers": "96",
    "spill_bytes": "0",
    "shared_bytes": "65536",
    "wgmma": "8",
    "mma": "0",
    "async_copies": "4",
    "tma_loads": "0",
    "wide_loads": "0",
    "buffers": "3 2",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_compiled_code_is_as_good_as_the_table(version: str) -> None:
    measured = measure(version)
    found = measured.failures + list(complaints(measured.rows, read_table(version)))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_numbers_of_a_step_compile_nothing_new(version: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.aot.steps"]
    inherited = environment(version, interpret=False)
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_obeys_the_rules(version: str) -> None:
    rows = read_table(version)
    found = list(broken_rules(rows))
    assert not found, "\n" + "\n".join(found)
    assert {key for key in (*SPILLS, *SINGLE_BUFFERED) if key[0] == version} <= set(rows), "an exception of no row"


@pytest.mark.parametrize(
    ("case", "architecture", "change", "said"),
    [
        ("op.case", "sm_80", {"spill_bytes": "4"}, "spill_bytes 4; allowed: 0"),
        ("paged_attention.prefill_fp16_x", "sm_90", {"wgmma": "0"}, "wgmma 0; at least: 1"),
        ("paged_attention.prefill_bf16_x", "sm_80", {"wgmma": "0"}, ""),
        ("mla_attention.decode_x", "sm_120", {"buffers": "1 2"}, "buffers 1 2; each at least: 2"),
        ("mla_attention.decode_x", "sm_100", {"buffers": ""}, "buffers none; each at least: 2"),
        ("mla_attention.decode_x", "gfx942", {"buffers": "1 2"}, ""),
        ("paged_attention.decode_x", "sm_90", {"async_copies": "0"}, "no asynchronous loads"),
        ("paged_attention.decode_x", "sm_90", {"async_copies": "0", "tma_loads": "2"}, ""),
        ("paged_attention.reduce_x", "sm_90", {"async_copies": "0", "buffers": ""}, ""),
    ],
)
def test_what_breaks_a_rule_is_named(case: str, architecture: str, change: Row, said: str) -> None:
    """Whatever the table says: it has the same row."""
    key = (KEY[0], case, architecture)
    row = {**ROW, "case": case, "architecture": architecture, "shared_bytes": "1024", **change}
    found = "\n".join(complaints({key: row}, {key: row}))
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"registers": str(96 + REGISTER_BUDGET)}, ""),
        ({"registers": str(97 + REGISTER_BUDGET)}, "registers 105; the table has 96"),
        ({"spill_bytes": "4"}, "spill_bytes 4"),
        ({"shared_bytes": str(228 << 10)}, "the target has 232448"),
        ({"wgmma": "0"}, "wgmma 0; the table has 8"),
        ({"async_copies": "0"}, "async_copies 0"),
        ({"buffers": "3 1"}, "buffers 3 1"),
        ({"buffers": ""}, "buffers none"),
        ({"buffers": "2 2 2", "wgmma": "1"}, ""),
    ],
)
def test_what_is_worse_is_named(change: Row, said: str) -> None:
    found = "\n".join(complaints({KEY: {**ROW, **change}}, {KEY: ROW}))
    assert said in found and bool(said) == bool(found)
    assert not found or "op.case on sm_90 with Triton-lang 3.6.0" in found


def test_a_row_too_many_or_too_few_is_named() -> None:
    assert "no row in figures.csv" in "".join(complaints({KEY: ROW}, {}))
    assert "no such case" in "".join(complaints({}, {KEY: ROW}))
