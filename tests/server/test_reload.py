"""Two live processes of one model: a reload while the old one drains, and several instances. Neither ends the server.

Ends with what the kernel saw: no Python process of these servers ended by a segmentation fault.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nereid.cli.server_process import TritonServer
from tests.server.conftest import StartServer
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import generate
from tests.server.repository import CONFIG, tiny_settings, write_model
from tests.server.server_state import is_live, load, unload, wait_until_idle
from tests.server.waiting import wait_until

ROUNDS = 3
LONG = {"max_tokens": 8000, "ignore_eos": True}


def segfaults() -> set[str]:
    """Processes of the server's stub that the kernel saw crash. Skips where its log cannot be read."""
    if os.geteuid() != 0 or shutil.which("dmesg") is None:
        pytest.skip("needs root and dmesg")
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    if log.returncode != 0:
        pytest.skip("the kernel's log cannot be read")
    return set(re.findall(r"triton_python_b\[\d+\]: segfault", log.stdout))


def answers(server: TritonServer) -> None:
    assert is_live(server)
    assert generate(server, "tiny", "x", {"max_tokens": 3}).status == 200


def reload_under_a_stream(server: TritonServer) -> None:
    with GrpcStream(server) as stream:
        stream.send("tiny", "long", "x", LONG)
        stream.wait(lambda: bool(stream.answers["long"].finals))
        assert unload(server, "tiny").status == 200
        assert load(server, "tiny").status == 200
        answers(server)
        assert "UNAVAILABLE" in stream.wait_done(20)["long"].errors[0]


def test_model_reloaded_while_it_drains(start_server: StartServer, tmp_path: Path, tiny_weights: Path) -> None:
    before = segfaults()
    write_model(tmp_path / "models", "tiny", tiny_settings(tiny_weights, drain_timeout_s=1.0))
    server = start_server(tmp_path / "models", ["tiny"])
    for _ in range(ROUNDS):
        reload_under_a_stream(server)
    answers(server)
    wait_until_idle(server, "tiny")
    server.stop()
    assert segfaults() == before


def test_changed_settings_are_loaded_in_place(start_server: StartServer, tmp_path: Path, tiny_weights: Path) -> None:
    version = write_model(tmp_path / "models", "tiny", tiny_settings(tiny_weights))
    server = start_server(tmp_path / "models", ["tiny"])
    for count in range(ROUNDS):
        settings = (version / "model.json").read_text()
        (version / "model.json").write_text(settings.rstrip().removesuffix("}") + f', "max_num_seqs": {10 + count}}}')
        assert load(server, "tiny").status == 200
        answers(server)


def test_several_instances_of_a_model(start_server: StartServer, tmp_path: Path, tiny_weights: Path) -> None:
    config = CONFIG.replace("count: 1", "count: 2")
    assert config != CONFIG
    write_model(tmp_path / "models", "tiny", tiny_settings(tiny_weights), config=config)
    server = start_server(tmp_path / "models", ["tiny"])
    for _ in range(ROUNDS):
        answers(server)
        assert unload(server, "tiny").status == 200
        wait_until(lambda: not server.stub_models(), "both processes have ended")
        assert load(server, "tiny").status == 200
    answers(server)
