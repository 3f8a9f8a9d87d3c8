"""The server's metrics endpoint, read as Prometheus would."""

from __future__ import annotations

import contextlib
import http.client
import re
from dataclasses import dataclass

from nereid.cli.server_process import HOST, TritonServer
from tests.server.waiting import TIMEOUT_S

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The series of one model."""

    text: str
    series: tuple[Series, ...]

    def values(self, name: str, **labels: str) -> list[float]:
        return [s.value for s in self.series if s.name == name and labels.items() <= s.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Of the one series that has these labels, among others."""
        (value,) = self.values(name, **labels)
        return value

    def pids(self) -> set[str]:
        return {s.labels["pid"] for s in self.series if "pid" in s.labels}


def metrics_text(server: TritonServer) -> str:
    connection = http.client.HTTPConnection(HOST, server.options.metrics_port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def metrics_page(server: TritonServer, model: str) -> MetricsPage:
    text = metrics_text(server)
    matches = (_LINE.match(line) for line in text.splitlines() if not line.startswith("#"))
    series = (Series(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in matches if m)
    return MetricsPage(text, tuple(s for s in series if s.labels.get("model_name") == model))
