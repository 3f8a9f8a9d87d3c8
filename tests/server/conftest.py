"""One real server for the whole run, on free loopback ports; and servers of their own for tests that end theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nereid.cli.provision import provision_server
from nereid.cli.server_process import HOST, ServerOptions, TritonServer
from nereid.processes import free_ports
from tests.conftest import read_json
from tests.server.repository import (
    CHAIN,
    CONFIG,
    SENDS_AFTER_FINAL,
    TOY_CONFIG,
    UNARY_CONFIG,
    tiny_settings,
    write_model,
    write_tiny_model,
)
from tests.server.server_state import is_live, load, unload
from tests.server.waiting import wait_until

StartServer = Callable[..., TritonServer]

_PROJECT = Path(__file__).resolve().parents[2]


def make_server(repository: Path, models: Sequence[str], **options: Any) -> TritonServer:
    """Not started yet. Its log lies beside the repository."""
    http_port, grpc_port, metrics_port = free_ports(HOST, 3)
    return TritonServer(
        ServerOptions(
            tree=provision_server(print),
            repository=repository,
            models=tuple(models),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            log=repository.parent / "tritonserver.log",
            **options,
        )
    )


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory, smollm2_directory: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "weights"
    write_tiny_model(directory, smollm2_directory)
    return directory


def write_repository(repository: Path, weights: Path) -> None:
    """Each model of the shared server; what is odd about it is what its tests need."""
    deployed = read_json(_PROJECT / "model_repository" / "smollm2" / "1" / "model.json")
    config = (_PROJECT / "model_repository" / "smollm2" / "config.pbtxt").read_text()
    write_model(repository, "smollm2", {**deployed, "dtype": "float32"}, config=config)
    write_model(repository, "tiny", tiny_settings(weights))
    write_model(repository, "tiny_unary", tiny_settings(weights), config=UNARY_CONFIG)
    config = (_PROJECT / "model_repository" / "smollm2_tensorrt_llm" / "config.pbtxt").read_text()
    write_model(repository, "tiny_tensorrt_llm", tiny_settings(weights), config=config)
    # 24 tokens a request at most, while the pool holds 64 such requests.
    write_model(repository, "tiny_limit", tiny_settings(weights, max_model_len=24, block_size=8, num_blocks=193))
    # The pool holds 48 tokens; the model was made for 8192.
    write_model(repository, "tiny_pool", tiny_settings(weights, block_size=4, num_blocks=13))
    # One runs, two wait, and no longer than this.
    queue = {"max_num_seqs": 1, "max_queue_size": 2, "queue_timeout_ms": 2500}
    write_model(repository, "tiny_queue", tiny_settings(weights, **queue))
    write_model(repository, "tiny_queue_unary", tiny_settings(weights, **queue), config=UNARY_CONFIG)
    # Ten find a place.
    overload = {"max_num_seqs": 2, "max_queue_size": 8, "queue_timeout_ms": 1500}
    write_model(repository, "tiny_overload", tiny_settings(weights, **overload))
    # Small enough to be touched whole at once: what grows later is not the pool.
    write_model(repository, "tiny_memory", tiny_settings(weights, num_blocks=257))
    write_model(repository, "chain", None, config=TOY_CONFIG, source=CHAIN)
    write_model(repository, "sends_after_final", None, config=TOY_CONFIG, source=SENDS_AFTER_FINAL)
    assert len(CONFIG.splitlines()) <= 3


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Iterator[TritonServer]:
    """The shared server with smollm2 and tiny; the other models of its repository are loaded where they are used."""
    repository = tmp_path_factory.mktemp("server") / "models"
    write_repository(repository, tiny_weights)
    with make_server(repository, ("smollm2", "tiny")) as running:
        running.wait_ready(120)
        yield running


@pytest.fixture(autouse=True)
def _shared_server_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that uses it, the shared server is live with all its Python processes."""
    if "server" not in request.fixturenames:
        yield
        return
    server: TritonServer = request.getfixturevalue("server")
    yield
    assert is_live(server)
    assert {"smollm2", "tiny"} <= server.stub_models()


@contextmanager
def loaded(server: TritonServer, model: str, *, ends: bool = True) -> Iterator[str]:
    """A model of the shared repository, loaded for as long as this lasts; its process ends with it, if it `ends`."""
    answer = load(server, model)
    assert answer.status == 200, answer
    yield model
    assert unload(server, model).status == 200
    if ends:
        wait_until(lambda: model not in server.stub_models(), f"{model} has been unloaded")


def _loaded_fixture(model: str, *, ends: bool = True) -> Any:
    @pytest.fixture(scope="module", name=model)
    def fixture(server: TritonServer) -> Iterator[str]:
        with loaded(server, model, ends=ends) as name:
            yield name

    return fixture


tiny_unary = _loaded_fixture("tiny_unary")
tiny_tensorrt_llm = _loaded_fixture("tiny_tensorrt_llm")
tiny_limit = _loaded_fixture("tiny_limit")
tiny_pool = _loaded_fixture("tiny_pool")
tiny_queue = _loaded_fixture("tiny_queue")
tiny_overload = _loaded_fixture("tiny_overload")
tiny_memory = _loaded_fixture("tiny_memory")
tiny_queue_unary = _loaded_fixture("tiny_queue_unary")
# Its streams are cancelled, after which the server (2.51) may keep a model for ever. One of Nereid frees its memory
# all the same; this one does not know how to.
chain = _loaded_fixture("chain", ends=False)
sends_after_final = _loaded_fixture("sends_after_final")


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server on `repository`, which is stopped at the end of the test, and waits until it is ready."""
    with ExitStack() as stack:

        def start(repository: Path, models: Sequence[str], **options: Any) -> TritonServer:
            running = stack.enter_context(make_server(repository, models, **options))
            running.wait_ready(60)
            return running

        yield start
