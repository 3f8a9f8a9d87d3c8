"""Metrics on the server's own endpoint: exact after known traffic, each family of the table there, and none of a model
that is gone."""

from __future__ import annotations

import http.client
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nereid.cli.server_process import HOST, TritonServer
from nereid.server.metric_table import Kind, metric_table
from tests.server.conftest import StartServer, loaded
from tests.server.grpc_client import GrpcStream, stream_texts
from tests.server.http_client import body_of, generate
from tests.server.metrics_page import MetricsPage, metrics_page
from tests.server.repository import tiny_settings, write_model
from tests.server.server_state import num_running, stub_pid, wait_until_idle
from tests.server.waiting import TIMEOUT_S, wait_until

EACH = 10
LONG = {"max_tokens": 4000, "ignore_eos": True}
SUCCESS, FAILURES = "vllm:request_success_total", "nereid:request_failures_total"


def send_good(server: TritonServer, model: str) -> None:
    for index in range(EACH):
        answer = generate(server, model, f"good {index}", {"max_tokens": 1 + index % 3, "ignore_eos": True})
        assert answer.status == 200, answer


def send_bad(server: TritonServer, model: str) -> None:
    """Half of them are refused before they are encoded, half after."""
    for index in range(EACH):
        prompt, sampling = ("bad", {"top_p": 7}) if index % 2 else ("bad " * 9000, {"max_tokens": 1})
        assert generate(server, model, prompt, sampling).status == 400


def send_cancelled(server: TritonServer, model: str) -> None:
    stream = GrpcStream(server)
    answers = [stream.send(model, str(index), f"cancelled {index}", LONG) for index in range(EACH)]
    stream.wait(lambda: all(answer.finals for answer in answers))
    stream.close(cancel=True)


def send_late(server: TritonServer, model: str) -> None:
    assert generate(server, model, "late", {**LONG, "timeout_ms": 300}, return_finish_reason=True).json[
        "finish_reason"
    ] == "timeout"  # fmt: skip


def page_when(server: TritonServer, model: str, holds: Callable[[MetricsPage], bool], what: str) -> MetricsPage:
    """The page once the model is idle and it says what it must: counts come about once a second."""
    wait_until_idle(server, model)
    pages: list[MetricsPage] = []

    def come() -> bool:
        pages.append(metrics_page(server, model))
        return holds(pages[-1])

    wait_until(come, what)
    return pages[-1]


def test_good_bad_cancelled_and_late_requests_are_counted_apart_and_anew_after_a_reload(server: TritonServer) -> None:
    with loaded(server, "tiny_memory") as model:
        for send in (send_good, send_bad, send_cancelled, send_late):
            send(server, model)
        page = page_when(server, model, all_are_counted, "all are counted")
        reasons = {"stop": 0, "length": EACH, "abort": EACH, "timeout": 1}
        assert {reason: page.value(SUCCESS, finished_reason=reason) for reason in reasons} == reasons
        codes = {"INVALID_ARGUMENT": EACH, "CANCELLED": EACH, "UNAVAILABLE": 0, "INTERNAL": 0}
        assert {code: page.value(FAILURES, code=code) for code in codes} == codes
        check_distributions(page, num_requests=2 * EACH + 1)
    assert metrics_page(server, model).series == (), "a model that is gone shows metrics"
    with loaded(server, "tiny_memory") as model:  # it counts anew
        second = metrics_page(server, model)
        assert sum(second.values(SUCCESS)) == 0
        assert len(second.pids()) == 1 and page.pids() != second.pids()


def all_are_counted(page: MetricsPage) -> bool:
    """Outcomes and what the engine knows come apart; the latter's histograms last."""
    outcomes = sum(page.values(SUCCESS)) + page.value(FAILURES, code="INVALID_ARGUMENT")
    engines = page.value("vllm:request_inference_time_seconds_count")
    return outcomes >= 3 * EACH + 1 and engines >= 2 * EACH + 1


def check_distributions(page: MetricsPage, num_requests: int) -> None:
    """All requests that the engine took in got a token; none was preempted."""
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
                 "request_prompt_tokens", "request_generation_tokens", "request_params_n",
                 "request_params_max_tokens"):  # fmt: skip
        assert page.value(f"vllm:{name}_count") == num_requests, name
    prompts, generated = page.value("vllm:prompt_tokens_total"), page.value("vllm:generation_tokens_total")
    assert page.value("vllm:request_prompt_tokens_sum") == prompts
    assert page.value("vllm:request_generation_tokens_sum") == generated
    assert page.value("vllm:inter_token_latency_seconds_count") == generated - num_requests
    assert page.value("vllm:iteration_tokens_total_sum") == prompts + generated - num_requests
    steps = page.value("vllm:iteration_tokens_total_count")
    assert [page.value("nereid:step_time_seconds_count", part=part) for part in ("schedule", "run", "update")] == [
        steps, steps, steps
    ]  # fmt: skip
    run_time = page.value("nereid:step_time_seconds_sum", part="run")
    assert 0 < run_time <= page.value("vllm:request_inference_time_seconds_sum")
    check_buckets(page)


def check_buckets(page: MetricsPage) -> None:
    for spec in metric_table(4096):  # what the model's pool holds
        for series in (s for s in page.series if s.name == spec.name + "_count"):
            rest = {name: value for name, value in series.labels.items() if name != "le"}
            buckets = [s for s in page.series if s.name == spec.name + "_bucket" and rest.items() <= s.labels.items()]
            by_bound = sorted((float(s.labels["le"]), s.value) for s in buckets)
            assert [bound for bound, _ in by_bound] == [*spec.buckets, math.inf], spec.name
            counts = [count for _, count in by_bound]
            assert counts == sorted(counts) and counts[-1] == series.value, spec.name


def test_every_family_of_the_table_is_served_and_finite(server: TritonServer) -> None:
    page = metrics_page(server, "tiny")
    for spec in metric_table(8192):
        if spec.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            continue  # its series come with the first draft
        histogram = spec.kind in (Kind.HISTOGRAM, Kind.TALLY)
        names = [spec.name + ending for ending in ("_bucket", "_sum", "_count")] if histogram else [spec.name]
        for name in names:
            assert page.values(name), name
            assert re.search(rf"^# HELP {re.escape(spec.name)}", page.text, re.MULTILINE), name
    assert all(math.isfinite(series.value) and series.value >= 0 for series in page.series)
    assert page.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="4096") == 1
    assert page.values("vllm:lora_requests_info", max_lora="0")


def test_counters_only_grow_and_gauges_follow_the_load(server: TritonServer) -> None:
    """While eight streams run."""
    counted = [spec.name for spec in metric_table(8192) if spec.kind is Kind.COUNTER]
    pages = [metrics_page(server, "tiny")]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream_texts, server, "tiny", ["grow"] * 8, {"max_tokens": 60, "ignore_eos": True})
        while not running.done():
            pages.append(metrics_page(server, "tiny"))
    tokens = "vllm:generation_tokens_total"
    wanted = pages[0].value(tokens) + 8 * 60
    pages.append(page_when(server, "tiny", lambda page: page.value(tokens) >= wanted, "all tokens are counted"))
    assert pages[-1].value(tokens) == wanted
    for before, after in zip(pages[:-1], pages[1:], strict=True):
        for name in counted:
            assert before.values(name) <= after.values(name), name
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert max(page.value("vllm:num_requests_running") for page in pages) > 1
    assert max(page.value(blocks, kv_cache_block_type="used") for page in pages) > 1
    for page in pages:
        used, free, most = (page.value(blocks, kv_cache_block_type=kind) for kind in ("used", "free", "max"))
        assert 0 <= used <= most == 4096 and 0 <= free <= most


def test_the_queue_shows_its_length_and_age(server: TritonServer, tiny_queue: str) -> None:
    """One runs, two wait, one more is refused."""
    with GrpcStream(server) as stream:
        for index in range(3):
            stream.send(tiny_queue, str(index), "x", LONG)
            stream.wait(lambda: bool(stream.answers["0"].finals))
        seen = page_when_waiting(server, tiny_queue)
        assert seen.value("nv_trt_llm_request_metrics", request_type="waiting") == 2
        assert seen.value("nv_trt_llm_request_metrics", request_type="scheduled") == 1
        assert seen.value("nv_trt_llm_request_metrics", request_type="active") == 3
        assert seen.value("nv_trt_llm_request_metrics", request_type="max") == 1
        assert 0.5 < seen.value("nereid:queue_age_seconds") < 2.6
        stream.send(tiny_queue, "refused", "x", LONG)
        stream.wait(lambda: bool(stream.answers["refused"].errors))
    page = page_when(server, tiny_queue, lambda page: page.value(FAILURES, code="UNAVAILABLE") >= 1, "it is counted")
    assert page.value("nereid:queue_age_seconds") == 0


def page_when_waiting(server: TritonServer, model: str) -> MetricsPage:
    pages: list[MetricsPage] = []

    def old() -> bool:
        pages.append(metrics_page(server, model))
        return pages[-1].value("nereid:queue_age_seconds") > 0.5

    wait_until(old, "the queue is half a second old")
    return pages[-1]


HAMMERS = """
from dataclasses import replace

from nereid.server import metrics
from nereid.server.model import TritonPythonModel as Base

metrics._STUCK_S = 1.0


class TritonPythonModel(Base):
    def _show_state(self):
        stats = self._service.engine.stats
        for count in range(20_000):
            self._metrics.show(replace(stats, num_running=count))
"""


@pytest.mark.slow
def test_a_server_killed_during_a_metric_call_leaves_no_process(
    start_server: StartServer, tmp_path: Path, tiny_weights: Path
) -> None:
    """That call never returns, and keeps the interpreter locked."""
    write_model(tmp_path / "models", "tiny", tiny_settings(tiny_weights), source=HAMMERS)
    server = start_server(tmp_path / "models", ["tiny"])
    wait_until(lambda: num_running(server, "tiny") > 0, "metrics are being set")
    pid = stub_pid(server, "tiny")
    server.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the stub has ended")


def orca_values(text: str) -> dict[str, float]:
    """What a server that answers load reports takes from its own metrics: the last value of each kind, read with
    digits alone."""
    pattern = r"nv_trt_llm_kv_cache_block_metrics(?:{(.*?)})?\s*(\d+(?:\.\d+)?)"
    found = re.findall(pattern, text)
    return {re.findall(r'kv_cache_block_type="(\w+)"', labels)[0]: float(value) for labels, value in found}


def test_load_reports_can_be_read_from_the_metrics(server: TritonServer) -> None:
    values = orca_values(metrics_page(server, "tiny").text)
    assert values["max"] > 0 and values["tokens_per"] == 16 and 0 <= values["used"] <= values["max"]
    assert values["fraction"] == pytest.approx(values["used"] / values["max"])


@pytest.mark.parametrize("kind", ["json", "text"])
def test_load_reports_come_with_the_answer(server: TritonServer, kind: str) -> None:
    binary = (server.options.tree / "bin" / "tritonserver").read_bytes()
    if b"kv_cache_utilization" not in binary:
        pytest.skip("this server was built without load reports in response headers (ORCA)")
    connection = http.client.HTTPConnection(HOST, server.options.http_port, timeout=TIMEOUT_S)
    headers = {"endpoint-load-metrics-format": kind}
    connection.request("POST", "/v2/models/tiny/generate", body_of("x", {"max_tokens": 1}), headers)
    report = connection.getresponse().getheader("endpoint-load-metrics") or ""
    connection.close()
    assert "kv_cache_utilization" in report and "max_token_capacity" in report
    assert kind == "text" or json.loads(report.removeprefix("JSON "))["named_metrics"]
