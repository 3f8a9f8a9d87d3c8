"""A small OTLP/HTTP collector: takes spans by POST, from the server (JSON) and from Nereid (protobuf)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nereid.cli.server_process import HOST

PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """Ids as hexadecimal text, times in nanoseconds since the epoch. failed: its status is an error."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """What came so far. down: requests are answered with 503."""

    port: int = 0
    down: bool = False
    num_refused: int = 0
    spans: list[CollectedSpan] = field(default_factory=list)  # Nereid's
    server_spans: list[CollectedSpan] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}{PATH}"

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in list(self.spans) if span.name == name]

    def take(self, kind: str, body: bytes) -> None:
        if kind == "application/json":
            self.server_spans.extend(_spans_of_json(json.loads(body)))
        else:
            self.spans.extend(_spans_of_protobuf(body))


def _spans_of_json(message: dict[str, Any]) -> Iterator[CollectedSpan]:
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                times = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                yield CollectedSpan(
                    span["name"], span["traceId"], span["spanId"], span.get("parentSpanId", ""), *times, False, {}
                )


def _spans_of_protobuf(body: bytes) -> Iterator[CollectedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        common = {a.key: a.value.string_value for a in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield CollectedSpan(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                span.status.code == span.status.STATUS_CODE_ERROR,
                common | {a.key: _plain(a.value) for a in span.attributes},
            )


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(element) for element in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port, for as long as this lasts."""
    collected = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collected.num_refused += collected.down
            if not collected.down and self.path == PATH:
                collected.take(self.headers["Content-Type"], body)
            self.send_response(503 if collected.down else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silence."""

    with ThreadingHTTPServer((HOST, 0), Handler) as http_server:
        collected.port = http_server.server_port
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield collected
        http_server.shutdown()
