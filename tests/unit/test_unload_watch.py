"""The watch that notices an unloading model, against a small HTTP server that answers as Triton does."""

from __future__ import annotations

import http.server
import threading
import unittest.mock
from collections.abc import Iterator

import pytest

from nereid.server.unload_watch import HttpAddress, UnloadWatch, address_in


class Endpoint(http.server.ThreadingHTTPServer):
    """Answers every GET with `status`."""

    status = 200

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, Endpoint)
            self.server.paths.append(self.path)
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def __init__(self) -> None:
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), Endpoint.Handler)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def watch(endpoint: Endpoint, calls: list[int]) -> UnloadWatch:
    address = HttpAddress("127.0.0.1", endpoint.server_address[1])
    return UnloadWatch("m", address, lambda: calls.append(1))


def test_a_model_that_is_still_loading_is_not_unloading(endpoint: Endpoint) -> None:
    calls: list[int] = []
    endpoint.status = 400
    watcher = watch(endpoint, calls)
    for _ in range(5):
        watcher.check()
    assert not calls and endpoint.paths[0] == "/v2/models/m/ready"


def test_unloading_is_told_once_and_when_it_is_certain(endpoint: Endpoint) -> None:
    calls: list[int] = []
    watcher = watch(endpoint, calls)
    watcher.check()
    for status, expected in ((400, 0), (200, 0), (400, 0), (400, 1), (400, 1), (200, 1)):
        endpoint.status = status
        watcher.check()
        assert len(calls) == expected


def test_a_model_that_got_a_request_was_ready(endpoint: Endpoint) -> None:
    calls: list[int] = []
    endpoint.status = 400
    watcher = watch(endpoint, calls)
    watcher.saw_ready()
    watcher.check()
    watcher.check()
    assert calls == [1]


def test_a_closed_port_is_a_server_that_stops(endpoint: Endpoint) -> None:
    calls: list[int] = []
    watcher = watch(endpoint, calls)
    watcher.check()
    endpoint.shutdown()
    endpoint.server_close()
    watcher.check()
    watcher.check()
    assert calls == [1]


def test_an_endpoint_that_does_not_answer_proves_nothing(endpoint: Endpoint) -> None:
    calls: list[int] = []
    watcher = watch(endpoint, calls)
    watcher.check()
    with unittest.mock.patch("http.client.HTTPConnection.request", side_effect=OSError(99, "no address left")):
        for _ in range(5):
            watcher.check()
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tritonserver"], HttpAddress("127.0.0.1", 8000)),
        (["tritonserver", "--http-port=18", "--http-address=10.0.0.1"], HttpAddress("10.0.0.1", 18)),
        (["tritonserver", "--http-port", "18", "--http-address", "0.0.0.0"], HttpAddress("127.0.0.1", 18)),
    ],
)
def test_the_address_is_read_from_the_servers_arguments(arguments: list[str], expected: HttpAddress) -> None:
    assert address_in(arguments) == expected
