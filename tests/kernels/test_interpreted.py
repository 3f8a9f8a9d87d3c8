"""Runs the tests in triton_lang/ in processes of their own, where Triton-lang is imported with its interpreter on."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import nereid_kernels
from tests.kernels.triton_lang_versions import NEWEST, PINNED, ROOT, environment

FOLDER = Path(__file__).with_name("triton_lang")
TIMEOUT_S = 840


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", [PINNED, pytest.param(NEWEST, marks=pytest.mark.slow)])
def test_interpreted(version: str, tmp_path: Path) -> None:
    shares = split(sorted(FOLDER.glob("test_*.py")))
    reports = [tmp_path / f"{number}.xml" for number in range(len(shares))]
    logs = [report.with_suffix(".log") for report in reports]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for share, report, log in zip(shares, reports, logs, strict=True):
            workers.append(start(version, share, report, log))
        statuses = [worker.wait(TIMEOUT_S) for worker in workers]
    except subprocess.TimeoutExpired:
        statuses = [-1]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert set(statuses) == {0}, f"exit statuses {statuses}\n" + "\n".join(log.read_text("utf-8") for log in logs)
    wanted = {file.stem for share in shares for file in share} | {f"test_{name}" for name in operations()}
    assert not (silent := wanted - set().union(*map(parts_that_ran, reports))), f"no test ran in {sorted(silent)}"


def operations() -> set[str]:
    """The modules with a wrapper and a kernel."""
    package = Path(nereid_kernels.__file__).parent
    return {file.stem for file in package.glob("[!_]*.py")} & {file.stem for file in package.glob("triton_lang/*.py")}


def split(files: list[Path]) -> list[list[Path]]:
    """Two shares that take about as long: attention has the largest launches, and takes as long as all the others."""
    return [[file for file in files if (file.stem == "test_paged_attention") == alone] for alone in (True, False)]


def start(version: str, files: list[Path], report: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *map(str, files)]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(version, interpret=True),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def parts_that_ran(report: Path) -> set[str]:
    """The parts of the names, modules among them, of the tests that ran to their end."""
    cases = ElementTree.parse(report).iter("testcase")
    return {part for case in cases if case.find("skipped") is None for part in case.get("classname", "").split(".")}
