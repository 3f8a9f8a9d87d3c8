"""`python -m nereid.bench.worker_openvino`: OpenVINO GenAI's ContinuousBatchingPipeline as a worker.

Runs in that engine's own environment. Everything that the settings do not name stays as the library has it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from nereid.bench.worker_loop import Served, Steps, work

_CACHE_GB = 1


class OpenVino(Steps):
    """A pipeline on the CPU, stepped by the caller. settings: `model`, a GGUF file."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(lambda: bool(self._handles), self._gained)
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = _CACHE_GB
        scheduling.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduling, "CPU")
        self._handles: dict[int, Any] = {}
        self._missing: dict[int, int] = {}
        self._next_id = 0

    def add(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        token_ids = openvino.Tensor(np.array([prompt], np.int64))
        self._handles[index] = self._pipeline.add_request(self._next_id, token_ids, config)
        self._missing[index] = max_tokens
        self._next_id += 1

    def _gained(self) -> Iterator[tuple[int, Sequence[int]]]:
        self._pipeline.step()
        for index, handle in list(self._handles.items()):
            token_ids: list[int] = []
            while handle.can_read():
                token_ids += next(iter(handle.read().values())).generated_ids
            yield index, token_ids
            self._missing[index] -= len(token_ids)
            if self._missing[index] <= 0:
                del self._handles[index], self._missing[index]

    def versions(self) -> Mapping[str, str]:
        names = ("openvino-genai", "openvino")
        return {name: importlib.metadata.version(name) for name in names}


def load(settings: Mapping[str, Any]) -> Served:
    return OpenVino(settings)


if __name__ == "__main__":
    sys.exit(work(load))
