"""Tracer: spans of requests, as children of the server's own OpenTelemetry spans. Owns the exporter.

Only where the server traces in its `opentelemetry` mode, and the packages of the extra `tracing` are installed. The
sender hands over what a request's end tells (`ended`, an append to a bounded queue); the housekeeper makes spans of it
(`export`); the OpenTelemetry SDK's own thread sends them in batches. Invariant: nothing here slows or fails a request,
whatever the collector does; where it takes too little, the oldest spans are lost.

A request's span has the children queue (until its first step), prefill (until its first token) and decode (until its
last), as far as it came. Attributes are those of OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nereid.request import RequestFailure, RequestStats
from nereid.server.mailbox import Ending
from nereid.server.parent_arguments import options_in

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_LOG = logging.getLogger(__name__)
_MOST_ENDED = 2048
_CLOSE_S = 2.0
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Attributes = dict[str, str | int | Sequence[str]]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What becomes a span. trace_context: the server's, a JSON object of W3C headers.  ended: monotonic seconds."""

    trace_context: str
    ending: Ending
    ended: float

    @property
    def stats(self) -> RequestStats | None:
        """Where the request reached the scheduler."""
        return self.ending.last.stats

    @property
    def failure(self) -> RequestFailure | None:
        return self.ending.last.failure


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, in monotonic seconds."""

    name: str
    start: float
    end: float


def server_traces_to(arguments: Sequence[str]) -> str | None:
    """Where a server with these arguments sends its spans: a URL, empty for the default one. None: it sends none."""
    settings = dict(
        value.rpartition("opentelemetry,")[2].split("=", 1)
        for name, value in options_in(arguments)
        if name == "--trace-config" and "=" in value
    )
    if settings.get("mode") != "opentelemetry":
        return None
    url = settings.get("url", "")
    return url if not url or "://" in url else f"http://{url}"


def make_tracer(model_name: str, version: str, endpoint: str | None, arguments: Sequence[str]) -> Tracer | None:
    """A tracer where the server traces and the packages are there.

    endpoint: a full OTLP/HTTP URL; goes before OpenTelemetry's environment variables, and they before the server's own.
    arguments: the server's.
    """
    servers = server_traces_to(arguments)
    if servers is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _LOG.warning("the server traces, but there are no spans of requests: %s (pip install 'nereid[tracing]')", error)
        return None
    from_environment = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    url = endpoint or (None if from_environment else servers or None)
    service = os.environ.get("OTEL_SERVICE_NAME", "nereid")
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(model_name, version, provider)


class Tracer:
    """Spans of one model's requests."""

    def __init__(self, model_name: str, version: str, provider: TracerProvider) -> None:
        self._model: Attributes = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "nereid",
            "gen_ai.request.model": model_name,
            "nereid.model_version": version,
        }
        self._provider = provider
        self._tracer = provider.get_tracer("nereid")
        self._ended: deque[EndedRequest] = deque(maxlen=_MOST_ENDED)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def ended(self, trace_context: str, ending: Ending) -> None:
        """Take a request's end. Called by the sender."""
        self._ended.append(EndedRequest(trace_context, ending, time.monotonic()))

    def export(self) -> None:
        """Make spans of all that has ended; they leave by the SDK's own thread. Called by one thread at a time."""
        while self._ended:
            self._export(self._ended.popleft())

    def close(self) -> None:
        """Send what is there, for a short while, and end."""
        self.export()
        # By a thread that may be left behind: the SDK waits for a collector that is gone for up to half a minute.
        thread = threading.Thread(target=self._provider.shutdown, name="nereid-trace-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _export(self, request: EndedRequest) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier_of(request.trace_context))
        stats = request.stats
        start = request.ending.opened if stats is None else stats.arrival_time
        attributes = self._model | attributes_of(request)
        span = self._tracer.start_span(
            "nereid.request", parent, SpanKind.SERVER, attributes=attributes, start_time=self._epoch(start)
        )
        if request.failure is not None:
            span.set_status(Status(StatusCode.ERROR, request.failure.message))
        inside = set_span_in_context(span)
        for phase in phases_of(request):
            child = self._tracer.start_span(f"nereid.{phase.name}", inside, start_time=self._epoch(phase.start))
            child.end(self._epoch(phase.end))
        span.end(self._epoch(request.ended))

    def _epoch(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._epoch_ns


def carrier_of(trace_context: str) -> Mapping[str, str]:
    """The W3C headers in what the server hands over; none where that cannot be read."""
    try:
        headers = json.loads(trace_context)
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in headers.items()} if isinstance(headers, dict) else {}


def phases_of(request: EndedRequest) -> Iterator[Phase]:
    """How far a request came; where it ended in the middle, that phase ends there."""
    stats = request.stats
    if stats is None:
        return
    scheduled, first, last = stats.first_scheduled_time, stats.first_token_time, stats.last_token_time
    yield Phase("queue", stats.arrival_time, request.ended if scheduled is None else scheduled)
    if scheduled is not None:
        yield Phase("prefill", scheduled, request.ended if first is None else first)
    if first is not None and last is not None:
        yield Phase("decode", first, last)


def attributes_of(request: EndedRequest) -> Attributes:
    """What a span says of its request, beside the model."""
    attributes: Attributes = {}
    if request.ending.reasons:
        attributes["gen_ai.response.finish_reasons"] = [reason.value for reason in request.ending.reasons]
    if request.ending.num_sequences > 1:
        attributes["gen_ai.request.choice.count"] = request.ending.num_sequences
    if request.failure is not None:
        attributes["error.type"] = request.failure.code.name
    if (stats := request.stats) is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
            "gen_ai.usage.output_tokens": stats.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
            "nereid.num_preemptions": stats.num_preemptions,
            "nereid.num_draft_tokens": stats.num_draft_tokens,
            "nereid.num_accepted_tokens": stats.num_accepted_tokens,
        }
    return attributes
