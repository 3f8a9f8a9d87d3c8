"""ModelRunner: runs plans on one device: plan -> tensors -> model -> logits -> tokens. Lives behind the executor seam.

Owns the model, the KV cache's memory and the batch state. Used by the executor's thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from nereid.batch import Capacity, GuideMasks, SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.kv_cache.groups import groups_of
from nereid.kv_cache.storage import KVCacheStorage
from nereid.model_config import ModelConfig
from nereid.model_input import BatchState, RequestTokens
from nereid.models.layers import Kernels
from nereid.models.registry import Model, load_model
from nereid.sampling.noise import noise_key
from nereid.sampling.sampler import SamplingRow, sample
from nereid_kernels.backends import describe, pick

_LOG = logging.getLogger(__name__)


class ModelRunner:
    """One model on the CPU."""

    def __init__(self, directory: Path, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and make the KV cache. Raises ConfigError or ModelLoadError."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        dtype, device = choose_dtype(config.dtype), torch.device("cpu")
        self._backend = choose_backend(config, device)
        self._eos_token_ids = model_config.eos_token_ids
        self._model = load_model(
            directory, model_config, dtype, Kernels(self._backend, deterministic=config.deterministic)
        )
        (group,) = groups_of(model_config, config.block_size, dtype)
        num_blocks = config.num_blocks or config.kv_cache_bytes // group.bytes_per_block
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_bytes: got {config.kv_cache_bytes}; allowed: at least {2 * group.bytes_per_block}"
            )
        self._cache = KVCacheStorage(group, num_blocks, device)
        self._batch = BatchState(self._backend)
        self.capacity = Capacity(num_blocks, group.bytes_per_block, (group.block_size,))
        _LOG.info(
            "%s, %s with %d threads%s; KV cache: %d blocks of %d tokens, %.0f MiB",
            dtype, describe(device, self._backend), torch.get_num_threads(),
            ", deterministic" if config.deterministic else "", num_blocks, group.block_size,
            num_blocks * group.bytes_per_block / 2**20,
        )  # fmt: skip

    @property
    def model(self) -> Model:
        return self._model

    @property
    def kv_cache(self) -> KVCacheStorage:
        return self._cache

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput, masks: Callable[[], GuideMasks]) -> StepResult:
        """Carry out one plan. masks: waits for the step's, asked for only where a row that samples has a guide."""
        self._batch.apply(plan)
        if not plan.scheduled:
            return StepResult(plan.step, ())
        logits = self._model.forward(self._batch.build(plan.scheduled, self._cache), self._cache)
        sampling = [row for row in plan.scheduled if row.samples]
        return StepResult(plan.step, tuple(self._sample(sampling, logits)) if sampling else ())

    def _sample(self, rows: list[ScheduledRequest], logits: torch.Tensor) -> list[SampledToken]:
        requests = [self._batch[row.request_id] for row in rows]
        tokens, sound = sample(logits, [self._sampling_row(request) for request in requests], self._backend)
        sampled = []
        for row, request, token, ok in zip(rows, requests, tokens, sound, strict=True):
            if ok:
                request.token_ids.append(token)
                sampled.append(SampledToken(row.request_id, token))
            else:
                position = len(request.token_ids)
                sampled.append(SampledToken(row.request_id, -1, f"the logits at position {position} are not finite"))
        return sampled

    def _sampling_row(self, request: RequestTokens) -> SamplingRow:
        params = request.sampling
        banned: tuple[int, ...] = ()
        if request.num_output_tokens < params.min_tokens:
            banned = params.stop_token_ids if params.ignore_eos else (*self._eos_token_ids, *params.stop_token_ids)
        key = noise_key(params.seed, 0, len(request.token_ids))
        return SamplingRow(params.temperature, params.top_k, params.top_p, params.min_p, key, banned)


def choose_backend(config: EngineConfig, device: torch.device) -> str:
    """What runs the kernels. Raises ConfigError where that cannot run here."""
    try:
        backend = pick(device, config.attention_backend)
    except ValueError as error:
        raise ConfigError(f"attention_{error}") from error
    if config.deterministic and backend != "cpu":
        raise ConfigError(f"deterministic: got true with attention_backend {backend}; allowed: false")
    return backend


def choose_dtype(setting: str) -> torch.dtype:
    """The dtype of weights and KV. `auto`: bfloat16 where the processor has instructions for it, else float32."""
    if setting == "auto":
        # Without them a bfloat16 product is slower than a float32 one.
        return torch.bfloat16 if _has_bfloat16() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[setting]


def _has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
