"""`python -m nereid.bench.worker_nereid`: Nereid's engine, as the server's side uses it, as a worker."""

from __future__ import annotations

import importlib.metadata
import os
import queue
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereid.bench.worker_loop import Gain, Served, work
from nereid.build import build_engine
from nereid.config import EngineConfig
from nereid.request import Request, RequestFailure, RequestOutput, SamplingParams


class Nereid:
    """A Served. Requests go in by the engine's inbox; outputs come by the loop thread, which notes the time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: those of EngineConfig."""
        self._gained: queue.SimpleQueue[Gain | RequestFailure] = queue.SimpleQueue()
        self._index_of: dict[int, int] = {}
        self._next_id = 0
        self._engine = build_engine(EngineConfig.from_mapping(settings), Path.cwd(), self._receive).engine

    def add(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._index_of[self._next_id] = index
        self._engine.submit(Request(self._next_id, tuple(prompt), sampling, time.monotonic(), cache=False))
        self._next_id += 1

    def wait(self, timeout_s: float) -> Sequence[Gain]:
        gains: list[Gain] = []
        try:
            gains.append(self._checked(self._gained.get(timeout=timeout_s)))
            while True:
                gains.append(self._checked(self._gained.get_nowait()))
        except queue.Empty:
            return gains

    @staticmethod
    def _checked(gained: Gain | RequestFailure) -> Gain:
        if isinstance(gained, RequestFailure):
            raise RuntimeError(f"a request failed: {gained.code.value}: {gained.message}")
        return gained

    def _receive(self, outputs: tuple[RequestOutput, ...]) -> None:
        now = time.monotonic()
        for output in outputs:
            self._gained.put(output.failure or Gain(self._index_of[output.request_id], now, output.token_ids))

    def parts(self) -> Mapping[str, float]:
        """Mean milliseconds of a step since the last call, by its part."""
        report = self._engine.take_report()
        num_steps = sum(report.step_tokens.counts)
        return {part: times.total / num_steps * 1e3 for part, times in report.step_times.items()} if num_steps else {}

    def versions(self) -> Mapping[str, str]:
        return {"torch": importlib.metadata.version("torch")}


def load(settings: Mapping[str, Any]) -> Served:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the server does, see server/model.py; before torch is loaded
    return Nereid(settings)


if __name__ == "__main__":
    sys.exit(work(load))
