"""`nereid bench engine` through a real engine in a worker of its own, on a tiny model."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from nereid.bench.contestants import nereid
from nereid.bench.engine_alone import EngineOptions, bench_engine
from nereid.bench.prompts import PromptSource
from nereid.bench.worker_process import Program, Worker
from nereid.bench.workloads import WORKLOADS
from nereid.cli.checks import project_root
from nereid.errors import NereidError
from nereid.processes import session_processes


def test_engine_alone_is_measured_and_described(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(
        rounds=1, quantization="none", workloads=("steps-x16",), csv=tmp_path / "x.csv", profile=False
    )
    assert bench_engine(options, project_root(), print, nereid("none", lambda say: directory)) == 0
    said = capsys.readouterr().out
    assert "ceilings: reading" in said and "floors by quantization" in said
    assert "steps-x16: 16 requests, 2 prompt and 64 output tokens" in said
    assert "ms of a step" in said and "schedule" in said
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 2


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_worker_is_stopped_while_it_is_not_asked_and_gone_afterwards(directory: Path) -> None:
    settings = {"model": str(directory), "dtype": "float32"}
    with Worker(Program("tiny", Path(sys.executable), "nereid.bench.worker_nereid", settings)) as worker:
        pid = worker.pid
        deadline = time.monotonic() + 60
        while state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(pid) == "T"
        reply = worker.ask(WORKLOADS[0], PromptSource(range(3, 200)).prompts(WORKLOADS[0]))
        assert [len(answer.token_ids) for answer in reply.answers] == [64]
        assert set(reply.parts) == {"schedule", "run", "update"}
    assert not session_processes(pid)


def test_worker_whose_model_is_not_there_says_so(tmp_path: Path) -> None:
    program = Program("none", Path(sys.executable), "nereid.bench.worker_nereid", {"model": str(tmp_path / "no")})
    with pytest.raises(NereidError, match=r"none: ConfigError: model: got .*bench-none\.log"), Worker(program):
        pass
    assert not [p for p in session_processes(os.getpid()) if "worker_nereid" in " ".join(p.command)]
