"""Every kernel, compiled ahead of time for GPUs that are not at hand, is as good as the committed table says.

A new table after a change that is meant: python -m tests.kernels.aot.table
"""

from __future__ import annotations

import pytest

from tests.kernels.aot.table import REGISTER_BUDGET, Row, complaints, measure, read_table
from tests.kernels.triton_lang_versions import VERSIONS

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
