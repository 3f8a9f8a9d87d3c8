"""What a running server is doing: its metrics, its models, its processes."""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from pathlib import Path

import psutil

from nereid.cli.server_process import HOST, TritonServer
from nereid.processes import session_processes
from tests.server.http_client import Answer, http_call
from tests.server.waiting import TIMEOUT_S, wait_until

_METRICS_AGE_S = 0.5  # metrics are published about every 0.2 s


def gauge(server: TritonServer, name: str, model: str) -> float:
    """The value of a metric of one model."""
    connection = http.client.HTTPConnection(HOST, server.options.metrics_port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    match = re.search(rf'^{re.escape(name)}{{[^}}]*model_name="{re.escape(model)}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    assert match, f"no metric {name} of model {model}"
    return float(match[1])


def kv_cache_usage(server: TritonServer, model: str) -> float:
    return gauge(server, "vllm:kv_cache_usage_perc", model)


def num_running(server: TritonServer, model: str) -> float:
    return gauge(server, "vllm:num_requests_running", model)


def num_waiting(server: TritonServer, model: str) -> float:
    return gauge(server, "vllm:num_requests_waiting", model)


def wait_until_idle(server: TritonServer, model: str, within_s: float = 20.0) -> None:
    """Return once the model has used no KV block and run no request for as long as its metrics may be old."""
    idle_since: float | None = None

    def idle() -> bool:
        nonlocal idle_since
        if kv_cache_usage(server, model) or num_running(server, model) or num_waiting(server, model):
            idle_since = None
        elif idle_since is None:
            idle_since = time.monotonic()
        return idle_since is not None and time.monotonic() - idle_since > _METRICS_AGE_S

    wait_until(idle, f"{model} is idle", within_s)


def is_live(server: TritonServer) -> bool:
    return http_call(server, "GET", "/v2/health/live").status == 200


def is_ready(server: TritonServer, model: str) -> bool:
    return http_call(server, "GET", f"/v2/models/{model}/ready").status == 200


def load(server: TritonServer, model: str) -> Answer:
    return http_call(server, "POST", f"/v2/repository/models/{model}/load")


def unload(server: TritonServer, model: str) -> Answer:
    return http_call(server, "POST", f"/v2/repository/models/{model}/unload")


def stub_pid(server: TritonServer, model: str) -> int:
    """The Python process of a model."""
    for process in session_processes(server.pid):
        if len(process.command) > 1 and Path(process.command[1]).parts[-3:-2] == (model,):
            return process.pid
    raise AssertionError(f"model {model} has no process")


def resident_bytes_of(pid: int) -> int:
    size: int = psutil.Process(pid).memory_info().rss
    return size
