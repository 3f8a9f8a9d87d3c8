"""`nereid serve` as a process: it drains, it notices deaths, and it leaves nothing behind. The model streams words, so
that these tests are of the launcher and the real server alone."""

from __future__ import annotations

import http.client
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nereid.processes import free_ports, session_processes

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [-1] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
WORDS = 20
MODEL = f"""
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        for index in range({WORDS}):
            word = pb_utils.Tensor("text_output", np.array([b"word "], dtype=object))
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if index == {WORDS - 1} else 0
            sender.send(pb_utils.InferenceResponse([word]), flags=final)
            time.sleep(0.1)
"""
TIMEOUT_S = 60


def write_model(repository: Path, name: str, source: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    (repository / name / "1" / "model.py").write_text(source)


class Serve:
    """The command, running."""

    def __init__(self, repository: Path) -> None:
        self.http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
        command = [sys.executable, "-m", "nereid.cli", "serve", "--model-repository", str(repository)]
        command += [f"--http-port={self.http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.said = b""

    def wait_said(self, text: bytes) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                self.said += os.read(self.process.stdout.fileno(), 65536)

    def server_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def end(self) -> int:
        """The exit status; what was said is complete then."""
        rest, _ = self.process.communicate(timeout=TIMEOUT_S)
        self.said += rest
        return self.process.returncode


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    write_model(tmp_path, "words", MODEL)
    running = Serve(tmp_path)
    try:
        running.wait_said(b"READY")
        yield running
    finally:
        running.process.terminate()
        running.process.communicate(timeout=TIMEOUT_S)


def nothing_is_left(server: int, launcher: int) -> bool:
    return not session_processes(server) and not list(Path("/dev/shm").glob(f"nereid_{launcher}_*"))


def eventually(condition: Callable[[], bool], within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def stub_pid(server: int) -> int:
    return next(p.pid for p in session_processes(server) if "triton_python_backend_stub" in p.command[0])


def test_sigterm_lets_a_running_answer_end(serve: Serve) -> None:
    server = serve.server_pid()
    connection = http.client.HTTPConnection("127.0.0.1", serve.http_port, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/words/generate_stream", b'{"text_input": "x"}')
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    serve.process.send_signal(signal.SIGTERM)
    assert response.read().count(b"data: ") == WORDS - 1
    connection.close()
    assert serve.end() == 0
    assert b"the server has drained and ended" in serve.said
    assert nothing_is_left(server, serve.process.pid)


def test_second_signal_ends_at_once(serve: Serve) -> None:
    server = serve.server_pid()
    serve.process.send_signal(signal.SIGINT)
    serve.wait_said(b"up to 30 s, or their model's drain_timeout_s where that is less; once more to end at once")
    serve.process.send_signal(signal.SIGINT)
    assert serve.end() == 1
    assert nothing_is_left(server, serve.process.pid)


def test_dead_server_is_said_and_its_stub_and_memory_are_removed(serve: Serve) -> None:
    server = serve.server_pid()
    os.kill(server, signal.SIGKILL)
    assert serve.end() == 1
    assert b"the server ended by itself by signal 9" in serve.said
    assert nothing_is_left(server, serve.process.pid)


def test_dead_stub_is_said_and_ends_the_server(serve: Serve) -> None:
    server = serve.server_pid()
    os.kill(stub_pid(server), signal.SIGKILL)
    assert serve.end() == 1
    assert b"the Python process of model words ended by itself" in serve.said
    assert nothing_is_left(server, serve.process.pid)


def test_killed_launcher_takes_the_server_along(serve: Serve) -> None:
    server = serve.server_pid()
    serve.process.kill()
    serve.process.wait()
    assert eventually(lambda: nothing_is_left(server, serve.process.pid))


def test_model_that_does_not_load_is_one_line_with_its_reason(tmp_path: Path) -> None:
    source = "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no such key: x')\n"
    write_model(tmp_path, "broken", source)
    serve = Serve(tmp_path)
    assert serve.end() == 1
    assert b"\nnereid: model broken did not load: ValueError: no such key: x; the server's log: " in serve.said
