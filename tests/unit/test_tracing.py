"""Spans of ended requests, made into memory; and when there are none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nereid.errors import ErrorCode
from nereid.request import FinishReason, RequestFailure, RequestOutput, RequestStats
from nereid.server.mailbox import Ending
from nereid.server.tracing import Tracer, make_tracer, server_traces_to

CONTEXT = '{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'
URL = "http://127.0.0.1:4318/v1/traces"


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ([], None),
        (["--trace-config", "level=TIMESTAMPS"], None),
        (["--trace-config=mode=triton", "--trace-config=opentelemetry,url=x"], None),
        (["--trace-config=mode=opentelemetry"], ""),
        (["--trace-config", "mode=opentelemetry", "--trace-config", f"opentelemetry,url={URL}"], URL),
        ([f"--trace-config=opentelemetry,url={URL}?a=b", "--trace-config=mode=opentelemetry"], f"{URL}?a=b"),
        (["--trace-config=mode=opentelemetry", "--trace-config=opentelemetry,url=host:4318/v1/traces"],
         "http://host:4318/v1/traces"),
        (["--trace-config=mode=opentelemetry", "--trace-config"], ""),
    ],
)  # fmt: skip
def test_where_the_server_traces_to(arguments: list[str], target: str | None) -> None:
    assert server_traces_to(arguments) == target


def spans_of(output: RequestOutput, context: str = CONTEXT) -> dict[str, ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer("m", "1", provider)
    reasons = () if output.finish_reason is None else (output.finish_reason,)
    tracer.ended(context, Ending(100.0, output, reasons, 1))
    assert not exporter.get_finished_spans()  # the sender's thread makes none
    tracer.export()
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds_between(earlier: int | None, later: int | None) -> float:
    assert earlier is not None and later is not None
    return (later - earlier) / 1e9


def test_a_finished_request_has_all_phases() -> None:
    stats = RequestStats(10.0, 11.0, 13.0, 17.0, num_prompt_tokens=4, num_output_tokens=3)
    spans = spans_of(RequestOutput(1, finish_reason=FinishReason.STOP, stats=stats))
    request = spans["nereid.request"]
    assert request.parent is not None and request.context is not None
    assert f"{request.parent.span_id:x}" == "b7ad6b7169203331"
    lengths = {"nereid.queue": 1.0, "nereid.prefill": 2.0, "nereid.decode": 4.0}
    assert set(spans) == {"nereid.request", *lengths}
    for name, length in lengths.items():
        span = spans[name]
        assert seconds_between(span.start_time, span.end_time) == pytest.approx(length)
        assert span.parent is not None and span.parent.span_id == request.context.span_id
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_phases_stop_where_the_request_did() -> None:
    failure = RequestFailure(ErrorCode.UNAVAILABLE, "the queue is full")
    never = spans_of(RequestOutput(1, failure=failure, stats=RequestStats(10.0)))
    assert set(never) == {"nereid.request", "nereid.queue"}
    assert never["nereid.queue"].end_time == never["nereid.request"].end_time
    assert set(spans_of(RequestOutput(1, failure=failure, stats=RequestStats(10.0, 11.0)))) == {
        "nereid.request", "nereid.queue", "nereid.prefill"
    }  # fmt: skip
    refused = spans_of(RequestOutput(-1, failure=failure))
    assert set(refused) == {"nereid.request"}
    attributes = refused["nereid.request"].attributes
    assert attributes is not None and attributes["error.type"] == "UNAVAILABLE"
    assert refused["nereid.request"].status.description == "the queue is full"


@pytest.mark.parametrize("context", ["", "{", "[]", "{}", '{"traceparent": 5}', '{"traceparent": "00-0-0-01"}'])
def test_a_context_that_cannot_be_read_gives_a_trace_of_its_own(context: str) -> None:
    spans = spans_of(RequestOutput(1, finish_reason=FinishReason.STOP, stats=RequestStats(1.0)), context)
    assert spans["nereid.request"].parent is None


def test_nothing_is_made_or_loaded_where_the_server_does_not_trace() -> None:
    assert make_tracer("m", "1", URL, ["--trace-config=level=TIMESTAMPS"]) is None
    code = "import sys, nereid.server.tracing, nereid.config; sys.exit('opentelemetry' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_costs_the_traces_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert make_tracer("m", "1", None, ["--trace-config=mode=opentelemetry"]) is None
    assert "nereid[tracing]" in caplog.text
