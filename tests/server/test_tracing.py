"""Spans of requests on a real server that traces, sent to a collector of the test's own."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereid.cli.server_process import HOST, TritonServer
from tests.server.collector import Collector, collector
from tests.server.conftest import make_server
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import body_of, generate
from tests.server.repository import tiny_settings, write_model
from tests.server.waiting import TIMEOUT_S, wait_until

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Iterator[tuple[TritonServer, Collector]]:
    repository = tmp_path_factory.mktemp("traced") / "models"
    write_model(repository, "tiny", tiny_settings(tiny_weights))
    with collector() as collected:
        settings = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={collected.url}",
                    "opentelemetry,bsp_schedule_delay=100")  # fmt: skip
        extra = tuple(f"--trace-config={setting}" for setting in settings)
        # Batches leave at once, so that no test waits for them.
        server = make_server(repository, ("tiny",), extra=extra, environment={"OTEL_BSP_SCHEDULE_DELAY": "100"})
        with server:
            server.wait_ready(60)
            yield server, collected


def test_a_requests_spans_hang_under_the_servers_and_the_callers(traced: tuple[TritonServer, Collector]) -> None:
    server, collected = traced
    connection = http.client.HTTPConnection(HOST, server.options.http_port, timeout=TIMEOUT_S)
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
    body = body_of("a traced prompt", {"max_tokens": 5, "ignore_eos": True})
    connection.request("POST", "/v2/models/tiny/generate", body, headers)
    assert connection.getresponse().status == 200
    connection.close()
    wait_until(lambda: any(s.trace_id == TRACE_ID for s in collected.named("nereid.request")), "the span has come")
    wait_until(lambda: any(s.parent_id == CALLER_ID for s in collected.server_spans), "the server's spans have come")

    (request,) = (s for s in collected.named("nereid.request") if s.trace_id == TRACE_ID)
    above = {s.span_id: s for s in collected.server_spans}
    model = above[request.parent_id]
    assert model.name == "tiny" and above[model.parent_id].name == "InferRequest"
    assert above[model.parent_id].parent_id == CALLER_ID
    below = sorted((s for s in collected.spans if s.parent_id == request.span_id), key=lambda s: s.start)
    assert [s.name for s in below] == ["nereid.queue", "nereid.prefill", "nereid.decode"]
    assert {s.trace_id for s in (*below, model)} == {TRACE_ID}
    # The server's clock and ours agree; phases follow each other within the request.
    assert model.start <= request.start and below[0].start == request.start
    assert below[0].end == below[1].start and below[1].end == below[2].start and below[2].end <= request.end
    assert all(s.start < s.end for s in below)
    wanted = {
        "service.name": "nereid", "gen_ai.request.model": "tiny", "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"], "nereid.num_preemptions": 0,
    }  # fmt: skip
    assert {name: request.attributes.get(name) for name in wanted} == wanted
    assert not request.failed


def test_failed_requests_have_spans_too(traced: tuple[TritonServer, Collector]) -> None:
    server, collected = traced
    assert generate(server, "tiny", "x", {"top_p": 7}).status == 400
    with GrpcStream(server) as stream:
        stream.send("tiny", "cancelled", "x", {"max_tokens": 4000, "ignore_eos": True})
        stream.wait(lambda: bool(stream.answers["cancelled"].finals))
    failed = ("INVALID_ARGUMENT", "CANCELLED")

    def come() -> bool:
        return {s.attributes.get("error.type") for s in collected.named("nereid.request")} >= set(failed)

    wait_until(come, "the spans have come")
    refused, cancelled = (
        next(s for s in collected.named("nereid.request") if s.attributes.get("error.type") == code) for code in failed
    )
    assert refused.failed and cancelled.failed
    wait_until(lambda: len(children(collected, cancelled.span_id)) == 3, "its children have come")
    assert children(collected, refused.span_id) == set()  # it never reached the engine
    assert refused.start <= refused.end


def children(collected: Collector, span_id: str) -> set[str]:
    return {s.name for s in collected.spans if s.parent_id == span_id}


def test_a_collector_that_is_down_costs_no_answer(traced: tuple[TritonServer, Collector]) -> None:
    """And the server still stops in time, which the fixture's end sees."""
    server, collected = traced
    collected.down = True
    for index in range(5):
        assert generate(server, "tiny", f"down {index}", {"max_tokens": 2}).status == 200
    wait_until(lambda: collected.num_refused > 0, "an export has failed")
    assert generate(server, "tiny", "after", {"max_tokens": 2}).status == 200
