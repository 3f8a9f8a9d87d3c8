"""EngineMetrics: the table of metrics on the server's own metrics endpoint. Owns the server's metric objects.

Used by one thread at a time. Invariants: no call here can fail inside the server (fixed kinds, finite values, counters
that only grow), since a failing metric call can end a server of version 2.51; a gauge is set only where it changed, a
counter only where it grew, since each call goes to the server and back with the interpreter locked (about 13 us).
"""

from __future__ import annotations

import faulthandler
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import triton_python_backend_utils as pb_utils

from nereid.batch import EngineStats
from nereid.server.metric_table import Kind, Labels, MetricSpec, metric_table
from nereid.server.metric_values import LoadedEngine, Sample, empty_series, fixed_gauges, gauges, growth, observations
from nereid.server.outcomes import OutcomeReport
from nereid.statistics import EngineReport

_STUCK_S = 120.0
_CALLS_A_BREATH = 16
_BREATH_S = 2e-4
_TALLY_SERIES = ("_bucket", "_sum", "_count")


class EngineMetrics:
    """Metrics of one model instance, labelled with the model's name and version, and the process's id.

    The id keeps two live processes of one model apart (several instances, or a reload while the old one drains): where
    they share a metric, the first to let go of it frees it under the other's hands and ends the server (2.51).
    """

    def __init__(self, model_name: str, version: str, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        # vLLM's own endpoint says model_name, its Triton backend and TensorRT-LLM's say model.
        self._own = {"model_name": model_name, "model": model_name, "version": version, "pid": str(os.getpid())}
        self._buckets: dict[str, tuple[float, ...]] = {}
        # The families are kept: a metric goes when its family does.
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._shown: dict[tuple[str, Labels], float] = {}
        self._num_preemptions = 0
        self._num_calls = 0
        for spec in metric_table(loaded.max_model_len):
            self._add(spec)
        self._set(fixed_gauges(loaded))

    def show(self, stats: EngineStats) -> None:
        """Show the engine's state now."""
        with _ends_where_stuck():
            self._set(gauges(stats, self._loaded))
            preempted = stats.num_preemptions - self._num_preemptions
            self._num_preemptions = stats.num_preemptions
            self._increment([Sample("vllm:num_preemptions_total", preempted)])

    def add(self, report: EngineReport, outcomes: OutcomeReport) -> None:
        """Add what happened since the last call."""
        with _ends_where_stuck():
            self._increment(growth(report, outcomes))
            for sample in (sample for finished in report.finished for sample in observations(finished)):
                self._metric(sample).observe(sample.value)
                self._breathe()

    def close(self) -> None:
        """Take all series off the endpoint.

        A metric that is still held when the stub exits makes it crash (server 2.51): metrics go before their families.
        """
        self._metrics.clear()
        self._families.clear()

    def _add(self, spec: MetricSpec) -> None:
        kinds = pb_utils.MetricFamily
        kind = {Kind.GAUGE: kinds.GAUGE, Kind.HISTOGRAM: kinds.HISTOGRAM}.get(spec.kind, kinds.COUNTER)
        endings = _TALLY_SERIES if spec.kind is Kind.TALLY else ("",)
        for name in (spec.name + ending for ending in endings):
            self._families[name] = kinds(name=name, description=spec.help, kind=kind)
        if spec.kind is Kind.HISTOGRAM:
            self._buckets[spec.name] = spec.buckets
        for labels in spec.labels:
            for sample in empty_series(spec, labels):
                self._metric(sample)

    def _metric(self, sample: Sample) -> Any:
        """The metric of a series, made with its first value."""
        key = (sample.name, sample.labels)
        if (metric := self._metrics.get(key)) is None:
            extra = {"buckets": list(self._buckets[sample.name])} if sample.name in self._buckets else {}
            labels = {**self._own, **dict(sample.labels)}
            metric = self._metrics[key] = self._families[sample.name].Metric(labels=labels, **extra)
        return metric

    def _set(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            key = (sample.name, sample.labels)
            if math.isfinite(sample.value) and self._shown.get(key) != sample.value:
                self._metric(sample).set(sample.value)
                self._shown[key] = sample.value
                self._breathe()

    def _increment(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if 0 < sample.value < math.inf:
                self._metric(sample).increment(sample.value)
                self._breathe()

    def _breathe(self) -> None:
        """After each call to the server: let the engine's threads run from time to time."""
        self._num_calls += 1
        if self._num_calls % _CALLS_A_BREATH == 0:
            time.sleep(_BREATH_S)


@contextmanager
def _ends_where_stuck() -> Iterator[None]:
    """A call to a server that has just been killed never returns, and keeps the interpreter locked, so that no thread
    could notice. faulthandler's own thread needs no interpreter: it ends the process."""
    faulthandler.dump_traceback_later(_STUCK_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
