"""Which class computes which architecture, and how a model is loaded from a directory."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from nereid.kv_memory.storage import KVCacheStorage
from nereid.model_config import ModelConfig
from nereid.model_input import ModelInput
from nereid.models.family import Family
from nereid.models.llama import Llama
from nereid.models.operations import Weights
from nereid.models.weights import WeightReader

_LOG = logging.getLogger(__name__)
# Mistral (Jiang et al. 2023, arXiv 2310.06825) and Ministral are Llama with windows, which come with a layer's cache.
ARCHITECTURES: MappingProxyType[str, type[Llama[Any]]] = MappingProxyType(
    {"LlamaForCausalLM": Llama, "MistralForCausalLM": Llama, "MinistralForCausalLM": Llama}
)
W = TypeVar("W")


class Model(Protocol):
    """What the model runner needs of a model."""

    def forward(self, batch: ModelInput, cache: KVCacheStorage, num_layers: int | None = None) -> torch.Tensor:
        """Hidden states [rows, hidden] of the tokens that `batch` asks for, from which `logits` are made. num_layers:
        only so many are computed, for measurements."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] float32, which the caller may change; overwritten by the next call."""
        ...


def load_family(directory: Path, config: ModelConfig, dtype: torch.dtype, weights: Weights[W]) -> Family[W]:
    """The model in `directory`, its weights in `dtype`. Raises ModelLoadError, which names the file or tensor."""
    start = time.monotonic()
    family = ARCHITECTURES[config.architecture]
    with WeightReader(directory, family.ignored_tensors(config)) as reader:
        loaded: Family[W] = family(config, reader, dtype, weights)
    _LOG.info("loaded %s from %s in %.1f s", config.architecture, directory, time.monotonic() - start)
    return loaded
