"""A real server with a tiny model and a model that says what it is told, and the gateway as its command in front."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from nereid.cli.server_process import HOST, TritonServer
from nereid.processes import free_ports
from tests.gateway.repository import SAYS, SAYS_CONFIG
from tests.server.conftest import make_server
from tests.server.repository import tiny_settings, write_model, write_tiny_model
from tests.server.waiting import TIMEOUT_S

KEY = "key-of-the-tests"


class Gateway:
    """`nereid gateway`, running."""

    def __init__(self, grpc_port: int, arguments: Sequence[str] = (), environment: Mapping[str, str] = {}) -> None:
        [self.port] = free_ports("127.0.0.1", 1)
        command = [sys.executable, "-m", "nereid.cli", "gateway", f"--grpc={HOST}:{grpc_port}", f"--port={self.port}"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        self.said = b""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_said(self, text: bytes) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.said:
            assert time.monotonic() < deadline and self.process.poll() is None, self.said
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                self.said += os.read(self.process.stdout.fileno(), 65536)

    def end(self) -> int:
        """SIGTERM, then the exit status; what was said is complete then."""
        self.process.terminate()
        rest, _ = self.process.communicate(timeout=TIMEOUT_S)
        self.said += rest
        return self.process.returncode

    def client(self, key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


@contextmanager
def running_gateway(
    grpc_port: int, arguments: Sequence[str] = (), environment: Mapping[str, str] = {}
) -> Iterator[Gateway]:
    gateway = Gateway(grpc_port, arguments, environment)
    try:
        gateway.wait_said(b"READY")
        yield gateway
    finally:
        status = gateway.end()
    assert status == 0 and b"Traceback" not in gateway.said, gateway.said.decode()


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory, smollm2_directory: Path) -> Iterator[TritonServer]:
    """Models: tiny (the engine, with random weights), says (a model that says what it is told), says_once and
    says_batched (that one, not decoupled or with a leading dimension), and one that is not loaded."""
    weights = tmp_path_factory.mktemp("gateway") / "weights"
    write_tiny_model(weights, smollm2_directory)
    repository = weights.parent / "models"
    write_model(repository, "tiny", tiny_settings(weights, max_num_seqs=16, max_queue_size=8))
    write_model(repository, "says", None, config=SAYS_CONFIG, source=SAYS)
    write_model(repository, "says_once", None, config=SAYS_CONFIG.replace("true }\n", "false }\n", 1), source=SAYS)
    batched = SAYS_CONFIG.replace("max_batch_size: 0", "max_batch_size: 1")
    assert batched != SAYS_CONFIG
    write_model(repository, "says_batched", None, config=batched, source=SAYS)
    write_model(repository, "not_loaded", tiny_settings(weights))
    with make_server(repository, ("tiny", "says", "says_once", "says_batched")) as running:
        running.wait_ready(120)
        yield running


@pytest.fixture(scope="session")
def gateway(triton: TritonServer) -> Iterator[Gateway]:
    with running_gateway(triton.options.grpc_port) as running:
        yield running


@pytest.fixture(scope="session")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as made:
        yield made
