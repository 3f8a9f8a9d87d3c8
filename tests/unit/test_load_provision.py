"""Installing load tools: what goes wrong is one line with its reason, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.server.waiting import wait_until

PROVISION = Path(__file__).resolve().parents[2] / "client_examples" / "load" / "provision.py"


def start(tool: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROVISION), tool]
    environment = {**os.environ, "NEREID_CACHE": str(cache), **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left(cache: Path) -> list[str]:
    """What lies in the tools' folder, but for lock files."""
    return [path.name for path in (cache / "load-tools").iterdir() if path.suffix != ".lock"]


def test_tool_that_cannot_be_fetched_leaves_nothing(tmp_path: Path) -> None:
    failing = start("perf_analyzer", tmp_path, PIP_CONFIG_FILE="/dev/null", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    out, err = failing.communicate(timeout=60)
    assert (failing.returncode, out) == (1, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("provision: cannot install perf_analyzer==2.60.0: ERROR: No matching distribution")
    assert lines[1].endswith(f"; the log: {tmp_path}/logs/install-perf_analyzer.log")
    assert left(tmp_path) == []


def test_installation_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    stopped = start("genai-perf", tmp_path)
    venv = tmp_path / "load-tools" / ".genai-perf-0.0.16.partial" / "venv"
    wait_until(venv.is_dir, "the installation has begun")
    stopped.send_signal(signal.SIGTERM)
    out, _ = stopped.communicate(timeout=60)
    assert (stopped.returncode, out) == (128 + signal.SIGTERM, "")
    assert left(tmp_path) == []


def test_name_of_no_tool(tmp_path: Path) -> None:
    wrong = start("locust", tmp_path)
    _, err = wrong.communicate(timeout=60)
    assert wrong.returncode == 2
    assert "perf_analyzer" in err
    assert "aiperf" in err
