"""EngineMetrics: the engine's state on the server's own metrics endpoint, under vLLM's names.

Used by one thread at a time. Invariant: no call here can fail inside the server (fixed kinds, finite values, counters
that only grow), since a failing metric call can end a server of version 2.51.
"""

from __future__ import annotations

import os
from typing import Any

import triton_python_backend_utils as pb_utils

from nereid.batch import EngineStats

_GAUGES = {
    "vllm:num_requests_running": "Requests that take part in steps now.",
    "vllm:num_requests_waiting": "Requests that wait to be scheduled, preempted ones included.",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all of them.",
}
_PREEMPTIONS = "vllm:num_preemptions_total"


class EngineMetrics:
    """Metrics of one model instance, labelled with the model's name and version, and the process's id.

    The id keeps two live processes of one model apart (several instances, or a reload while the old one drains): where
    they share a metric, the first to let go of it frees it under the other's hands and ends the server (2.51).
    """

    def __init__(self, model_name: str, version: str) -> None:
        labels = {"model_name": model_name, "version": version, "pid": str(os.getpid())}
        family = pb_utils.MetricFamily
        # The families are kept: a metric goes when its family does.
        self._families = {
            name: family(name=name, description=text, kind=family.GAUGE) for name, text in _GAUGES.items()
        }
        self._gauges: dict[str, Any] = {name: f.Metric(labels=labels) for name, f in self._families.items()}
        counted = "Requests that had to give their KV blocks up and be recomputed."
        self._preemptions_family = family(name=_PREEMPTIONS, description=counted, kind=family.COUNTER)
        self._preemptions: Any = self._preemptions_family.Metric(labels=labels)
        self._num_preemptions = 0

    def publish(self, stats: EngineStats) -> None:
        """Show `stats`."""
        self._set(stats.num_running, stats.num_waiting, stats.kv_cache_usage)
        if grown := max(0, stats.num_preemptions - self._num_preemptions):
            self._preemptions.increment(grown)
            self._num_preemptions += grown

    def close(self) -> None:
        """Show an empty engine, since the server keeps the last values of a model that is gone; then let go of them.

        A metric that is still held when the stub exits makes it crash (server 2.51): metrics go before their families.
        """
        self._set(0, 0, 0.0)
        self._gauges.clear()
        self._families.clear()
        del self._preemptions, self._preemptions_family

    def _set(self, running: int, waiting: int, usage: float) -> None:
        for gauge, value in zip(self._gauges.values(), (running, waiting, usage), strict=True):
            gauge.set(value)
