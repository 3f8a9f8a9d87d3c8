"""What the two command lines do that needs no GPU."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from nereid_kernels import launch, roofline, tune
from nereid_kernels.cost import Cost
from nereid_kernels.workloads import WORKLOADS
from tests.kernels.test_interpreted import operations

HEADER = "kernel,architecture,itemsize,size,num_warps,num_stages,tiles\n"


def problem(**tiles: tuple[int, ...]) -> tune.Problem:
    return tune.Problem("matmul", 2, 128, lambda device: [], num_warps=(4, 8), num_stages=(2, 3, 4), tiles=tiles)


def test_candidates_are_the_whole_grid() -> None:
    found = problem(BLOCK_M=(16, 64), BLOCK_N=(32,)).candidates()
    assert len({str(config) for config in found}) == len(found) == 2 * 3 * 2
    assert all(set(config.tiles) == {"BLOCK_M", "BLOCK_N"} for config in found)
    assert all(one.candidates() for one in tune.PROBLEMS)


def test_every_kernel_of_the_table_is_tuned() -> None:
    with launch.TABLE.open(encoding="utf-8") as file:
        assert {row["kernel"] for row in csv.DictReader(file)} == {one.kernel for one in tune.PROBLEMS}


def test_each_tile_of_attention_is_tried_where_it_is_not_cut_down() -> None:
    """Short queries have tiles no wider than their rows."""
    for one in tune.PROBLEMS:
        if one.kernel.startswith("paged_attention_") and "BLOCK_M" in one.tiles:
            tried = set()
            for config in one.candidates():
                with launch.override(one.kernel, config):
                    launches = one.make(torch.device("meta"), "sm_90")
                tried |= {item.arguments.get("BLOCK_M") for item in launches}
            assert set(one.tiles["BLOCK_M"]) <= tried


def test_an_override_replaces_the_table_for_its_kernel_alone() -> None:
    config = problem(BLOCK_M=(16,)).candidates()[0]
    before = launch.choose("rms_norm", "sm_90", size=64)
    with launch.override("rms_norm", config):
        assert launch.choose("rms_norm", "sm_90", itemsize=4, size=1 << 20) is config
        assert launch.choose("sample", "sm_90") is not config
    assert launch.choose("rms_norm", "sm_90", size=64) is before


def test_the_fastest_candidate_that_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([float("inf"), 3.0, 2.0, 4.0, 9.0, float("inf")])
    monkeypatch.setattr(tune, "_time_ms", lambda launches: next(times))
    config, milliseconds = tune.fastest(problem(), torch.device("cpu"))
    assert (config.num_warps, config.num_stages, milliseconds) == (4, 4, 2.0)
    monkeypatch.setattr(tune, "_time_ms", lambda launches: float("inf"))
    with pytest.raises(RuntimeError, match="none of 6 candidates"):
        tune.fastest(problem(), torch.device("cpu"))


def test_a_row_is_replaced_or_follows_its_kernel(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    old = "matmul,any,0,0,4,2,BLOCK_M=16\n"
    path.write_text(HEADER + old + "rms_norm,any,0,0,4,1,\n", "utf-8")
    first, *_, last = problem(BLOCK_M=(16, 64)).candidates()
    for config in (last, first):
        tune.write(path, tune.as_row(problem(), "sm_90", config))
    assert path.read_text("utf-8") == HEADER + old + "matmul,sm_90,2,128,4,2,BLOCK_M=16\nrms_norm,any,0,0,4,1,\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = launch.TABLE.read_bytes()
    assert tune.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and launch.TABLE.read_bytes() == before


def test_the_floor_is_the_slower_of_memory_and_compute() -> None:
    gpu = roofline.Gpu("sm_90", bandwidth=100.0, bf16=1000.0, source="")
    assert (gpu.floor_s(Cost(distinct=200)), gpu.bound(Cost(distinct=200))) == (2.0, "memory")
    assert (gpu.floor_s(Cost(distinct=200, flops=5000)), gpu.bound(Cost(distinct=200, flops=5000))) == (5.0, "compute")


def test_roofline_prints_every_operation_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "roof.svg"
    assert roofline.main(["--gpu", "H200", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    counted, left_out = said.split("left out")
    rows = [line for line in counted.splitlines() if "H200  " in line]
    for operation, shape in WORKLOADS:
        is_counted = any(re.match(f"{operation} +{re.escape(shape)} ", row) for row in rows)
        assert (f"{operation} {shape}" in left_out) != is_counted
    assert {operation for operation, _ in WORKLOADS} == operations()
    assert all(words not in left_out for words in ("attention", "matmul", "norm", "kv_write", "copy"))
    assert "55.93" in said and "H100" not in said
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_without_triton_lang_roofline_says_so_in_one_line() -> None:
    """In a process of its own, where the package cannot be imported."""
    program = "import sys; sys.modules['triton'] = None; from nereid_kernels.roofline import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("roofline: needs the package triton")
    assert done.stderr.count("\n") == 1
