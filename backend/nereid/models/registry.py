"""Which class computes which architecture, and how a model is loaded from a directory."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

import torch

from nereid.kv_cache.storage import KVCacheStorage
from nereid.model_config import ModelConfig
from nereid.model_input import ModelInput
from nereid.models.layers import Kernels
from nereid.models.llama import Llama
from nereid.models.weights import WeightReader

_LOG = logging.getLogger(__name__)
_ARCHITECTURES = {"LlamaForCausalLM": Llama}


class Model(Protocol):
    """What the model runner needs of a model."""

    def forward(self, batch: ModelInput, cache: KVCacheStorage) -> torch.Tensor:
        """Hidden states [rows, hidden] of the tokens that `batch` asks for, from which `logits` are made."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] float32, which the caller may change."""
        ...


def load_model(directory: Path, config: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> Model:
    """The model in `directory`, its weights in `dtype`. Raises ModelLoadError, which names the file or tensor."""
    start = time.monotonic()
    family = _ARCHITECTURES[config.architecture]
    with WeightReader(directory, family.ignored_tensors(config)) as reader:
        model = family(config, reader, dtype, kernels)
    _LOG.info("loaded %s from %s in %.1f s", config.architecture, directory, time.monotonic() - start)
    return model
