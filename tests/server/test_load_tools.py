"""The load tools, by the scripts of client_examples/load: each finishes a run and prints figures.

By hand (`./nereid test -m slow tests/server/test_load_tools.py`): the first run installs about 2 GB of tools.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereid.cli.server_process import TritonServer
from nereid.processes import free_ports, session_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOAD = Path(__file__).resolve().parents[2] / "client_examples" / "load"
MODEL = "tiny"
NUMBER = r"([0-9][0-9,]*\.[0-9]+)"


def run(script: str, port: int, model: str = MODEL, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {"CONCURRENCY": "2", "REQUESTS": "6", "INPUT_TOKENS": "24", "OUTPUT_TOKENS": "8", **settings}
    command = [str(LOAD / script), f"127.0.0.1:{port}", model]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=850
    )


def figure(said: str, name: str) -> float:
    """The first number after `name` (words of a table's row, which other characters may part)."""
    row = re.search(re.escape(name) + r"[^0-9\n]*" + NUMBER, said, re.IGNORECASE)  # the tools differ in case
    assert row, f"no {name!r} in:\n{said}"
    return float(row[1].replace(",", ""))


def check_nvidia_table(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert figure(done.stdout, "Request Count") == 6
    first, latency = figure(done.stdout, "Time to First Token (ms)"), figure(done.stdout, "Request Latency (ms)")
    assert 0 < first < latency
    assert figure(done.stdout, "Inter Token Latency (ms)") > 0
    assert figure(done.stdout, "Output Token Throughput (tokens/sec)") > 0


def test_perf_analyzer(server: TritonServer, tmp_path: Path) -> None:
    done = run("perf_analyzer.sh", server.options.grpc_port, RESULTS=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "concurrency 2: 6 requests, 0 without an answer" in done.stdout
    assert 0 < figure(done.stdout, "TTFT (ms)") < figure(done.stdout, "request latency (ms)")
    assert figure(done.stdout, "ITL (ms)") > 0
    per_request = figure(done.stdout, "output tokens/s") / figure(done.stdout, "requests/s")
    assert per_request == pytest.approx(8, rel=0.05)  # two numbers of two decimals
    assert (tmp_path / "profile_export.json").is_file()


def test_genai_perf_kserve(server: TritonServer) -> None:
    check_nvidia_table(run("genai_perf_kserve.sh", server.options.grpc_port))


def test_genai_perf_generate(server: TritonServer) -> None:
    check_nvidia_table(run("genai_perf_generate.sh", server.options.http_port))


def test_aiperf_without_gateway(server: TritonServer) -> None:
    done = run("aiperf_generate_stream.sh", server.options.http_port)
    check_nvidia_table(done)
    assert figure(done.stdout, "Request Error Rate (%)") == 0


@pytest.fixture(scope="module")
def gateway_port(server: TritonServer) -> Iterator[int]:
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "nereid.cli", "gateway", f"--grpc=127.0.0.1:{server.options.grpc_port}"]
    gateway = subprocess.Popen(
        [*command, f"--port={port}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert gateway.stdout is not None
    try:
        assert any("READY" in line for line in gateway.stdout), "the gateway ended before it was ready"
        yield port
    finally:
        gateway.terminate()
        gateway.communicate(timeout=30)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_through_the_gateway(gateway_port: int, endpoint: str) -> None:
    done = run("aiperf.sh", gateway_port, ENDPOINT=endpoint)
    check_nvidia_table(done)
    assert figure(done.stdout, "Request Error Rate (%)") == 0


def test_tool_that_waits_for_ever_is_ended_whole(tmp_path: Path) -> None:
    """A server that accepts and never answers: perf_analyzer alone would wait without end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [str(LOAD / "perf_analyzer.sh"), f"127.0.0.1:{silent.getsockname()[1]}"]
        environment = {**os.environ, "LIMIT_S": "5", "RESULTS": str(tmp_path)}
        started = time.monotonic()
        script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        _, said = script.communicate(timeout=120)
    assert script.returncode == 1
    assert "perf_analyzer: not done after 5 s, and ended" in said
    assert time.monotonic() - started > 5
    assert not session_processes(script.pid)


def test_model_that_is_not_there_is_said(server: TritonServer) -> None:
    done = run("perf_analyzer.sh", server.options.grpc_port, model="no_such_model")
    assert done.returncode == 1
    assert "no_such_model" in done.stderr
