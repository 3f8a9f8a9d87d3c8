"""What tests/gpu does that needs no GPU: it is refused in one line, and its problems are well-formed."""

from __future__ import annotations

import ast
import csv
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nereid_kernels
from nereid_kernels.reference import paged_attention as reference
from nereid_kernels.workloads import WORKLOADS
from tests.gpu import bench_attention, bench_operations, opponents
from tests.gpu.bench_attention import POINTS, Point
from tests.gpu.measure import Peaks, Row, table

META, ARCHITECTURE = torch.device("meta"), "sm_90"
PEAKS = Peaks(copy=4e12, matmul=8e14)
SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "run.sh"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("python", "said"), [(sys.executable, "run.sh: needs a GPU; torch"), ("no-such-python", "run.sh: needs Python;")]
)
def test_the_script_says_in_one_line_what_is_missing(python: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    environment = {**os.environ, "PYTHON": python}
    done = subprocess.run([SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_script_hints_at_the_projects_own_environment(tmp_path: Path) -> None:
    own = tmp_path / ".venv" / "bin" / "python"
    script = tmp_path / "tests" / "gpu" / "run.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)

    def said(python: str) -> str:
        environment = {**os.environ, "PYTHON": python}
        command = [script, tmp_path / "results"]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        ).stderr

    assert "; try" not in said(sys.executable) and "; try" not in said("no-such-python")
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert said(sys.executable).endswith("; try PYTHON=.venv/bin/python\n")
    assert said("no-such-python").endswith("; try PYTHON=.venv/bin/python\n")
    assert said(str(own)) and "; try" not in said(str(own))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("main", [bench_attention.main, bench_operations.main])
def test_a_benchmark_without_a_gpu_is_refused_in_one_line(
    main: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main) and main(["--csv", str(tmp_path / "x.csv")]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_every_operation_is_timed() -> None:
    package = Path(nereid_kernels.__file__).parent
    kernels = {file.stem for file in package.glob("triton_lang/*.py")}
    assert {operation for operation, _ in WORKLOADS} == {f.stem for f in package.glob("[!_]*.py")} & kernels


def test_every_kernel_is_timed() -> None:
    """By its function that makes a launch."""
    package = Path(nereid_kernels.__file__).parent
    made = {name for file in package.glob("triton_lang/*.py") for name in find_launchers(file)}
    used = {name for file in package.glob("workloads/*.py") for name in find_launchers(file, ast.ImportFrom)}
    assert made == used and len(made) > 15


def find_launchers(file: Path, kind: type[ast.AST] = ast.FunctionDef) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, kind)]
    names = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    names += [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return {name for name in names if name.startswith("launch_")}


@pytest.mark.parametrize("name", WORKLOADS, ids=str)
def test_a_workload_gives_launches(name: tuple[str, str]) -> None:
    launches = WORKLOADS[name](META, ARCHITECTURE)
    row = bench_operations.measure(*name, launches, PEAKS, lambda start: 1e-3)
    assert row.microseconds == 1e3 and launches
    assert all(set(launch.arguments) == set(launch.kernel.arg_names) and all(launch.grid) for launch in launches)
    has_product = name[0] in ("matmul", "quantised_matmul", "paged_attention", "mla_attention")
    assert (row.tflop_per_s is not None) == has_product
    assert row.share_of_copy is not None or not (has_product or name[0] == "rms_norm")


def test_points_are_different_and_decode_comes_before_what_is_compared_with_it() -> None:
    assert set(bench_attention.FLEX_POINTS) <= set(POINTS)
    assert len(set(POINTS)) == len({point.shape for point in POINTS}) == len(POINTS)
    for place, point in enumerate(POINTS):
        assert point.kind != "verify" or replace(point, query_len=1) in POINTS[:place]


@pytest.mark.parametrize("point", [point for point in POINTS if point.seqs * point.seq_len <= 1 << 18], ids=str)
def test_a_point_gives_launches_and_a_row(point: Point) -> None:
    launches = point.launches(META, ARCHITECTURE)
    decode = Row(point.operation, "", "nereid", microseconds=800.0) if point.kind == "verify" else None
    row = bench_attention.measure(point, launches, PEAKS, lambda start: 1e-3, decode)
    assert row.gb_per_s is not None and row.tflop_per_s is not None
    assert row.gb_per_s * 1e6 >= point.cache_bytes, "the cache is read once at least"
    assert row.verification_to_decode == (1.25 if decode else None)


def test_operations_are_those_of_the_keys_that_are_seen() -> None:
    assert Point("paged_attention", 2, 2, 3).flops == 2 * 32 * (2 + 3) * 2 * 2 * 128
    assert Point("mla_attention", 1, 1, 3, heads=16).flops == 16 * 3 * 2 * (576 + 512)


def test_goals_are_judged_by_the_worst_point() -> None:
    def lines(value: float) -> list[str]:
        rows = {p: Row(p.operation, p.shape, "nereid", 1.0, 1.0, value, 1e3 * value, value, 2 * value) for p in POINTS}
        return bench_attention.judge(rows)

    assert [line.split(":")[0] for line in lines(0.86)] == ["met", "missed", "met", "met"]
    assert [line.split(":")[0] for line in lines(0.6)] == ["missed", "met", "met", "missed"]
    assert all(line.startswith("not measured: ") for line in bench_attention.judge({}))
    first = next(p for p in POINTS if p.kind == "decode" and p.seqs == 16)
    some = bench_attention.judge({first: Row(first.operation, first.shape, "nereid", share_of_copy=0.9)})
    assert some[0].endswith(f"worst 0.9 at {first.shape}; 17 of 18 points not measured")


def test_another_kernel_that_fails_is_a_row() -> None:
    point = Point("paged_attention", 16, 1, 8192)

    def fail(arguments: object) -> None:
        raise RuntimeError("no\nsuch kernel")

    rows = bench_attention.compare(point, point.launches(META, ARCHITECTURE), PEAKS, lambda start: 1.0, {"x": fail})  # type: ignore[dict-item]
    assert [(row.implementation, row.note) for row in rows] == [("x", "failed: RuntimeError: no such kernel")]


@pytest.mark.parametrize("query_len", [1, 4, 40])
def test_torchs_attention_is_asked_for_the_same_result(query_len: int) -> None:
    """With block tables in order and one block a sequence, so that its dense keys are those of the blocks."""
    query = torch.randn(3 * query_len, 4, 8)
    k_cache, v_cache = torch.randn(2, 4, 2, 40, 8)
    tables, lengths = torch.arange(1, 4).view(3, 1), [query_len] * 3
    sdpa = opponents.sdpa({"query_ptr": query, "k_ptr": k_cache, "v_ptr": v_cache, "block_tables_ptr": tables})()
    wanted = reference.paged_attention(query, k_cache, v_cache, list(tables), lengths, [40] * 3, 8**-0.5)
    assert isinstance(sdpa, torch.Tensor)
    torch.testing.assert_close(sdpa.reshape(3, 4, query_len, 8).transpose(1, 2).reshape(query.shape), wanted)


def test_rows_are_written_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    with table(path, {"machine": "M"}) as add:
        add(Row("matmul", "2 x 2", "nereid", 12.345678, note="a, note"))
        (row,) = csv.DictReader(path.read_text("utf-8").splitlines())
    assert (row["microseconds"], row["gb_per_s"], row["note"], row["machine"]) == ("12.346", "", "a, note", "M")
    assert "12.3 us" in capsys.readouterr().out
