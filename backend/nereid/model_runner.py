"""ModelRunner: runs plans on one device: plan -> tensors -> model -> hidden states -> logits -> tokens.

Lives behind the executor seam. Owns the model, the KV cache's memory, the batch state and the sampler. Used by the
executor's thread alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from nereid.batch import (
    Capacity,
    GuideMasks,
    PromptLogprobs,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.kv_cache.groups import groups_of
from nereid.kv_cache.storage import KVCacheStorage
from nereid.model_config import ModelConfig
from nereid.model_input import BatchState
from nereid.models.layers import Kernels
from nereid.models.registry import Model, load_model
from nereid.request import TokenLogprobs
from nereid.sampling.logprobs import token_logprobs
from nereid.sampling.sampler import Sampler, SamplingRow
from nereid_kernels.backends import describe, pick

_LOG = logging.getLogger(__name__)
_LOGPROB_ROWS = 64  # positions of prompts whose logits are in memory at a time


class ModelRunner:
    """One model on the CPU."""

    def __init__(self, directory: Path, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and make the KV cache. Raises ConfigError or ModelLoadError."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        dtype, device = choose_dtype(config.dtype), torch.device("cpu")
        self._backend = choose_backend(config, device)
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
        self._sampler = Sampler(model_config.eos_token_ids, model_config.vocab_size, self._backend)
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
        self._sampler.apply(plan)
        if not plan.scheduled:
            return StepResult(plan.step, ())
        hidden = self._model.forward(self._batch.build(plan.scheduled, self._cache), self._cache)
        sampling = [row for row in plan.scheduled if row.samples]
        told = self._prompt_logprobs(plan.scheduled, hidden[len(sampling) :])  # before tokens are drawn
        sampled = self._sample(sampling, hidden[: len(sampling)], masks) if sampling else ()
        return StepResult(plan.step, sampled, told)

    def _sample(
        self, rows: list[ScheduledRequest], hidden: torch.Tensor, masks: Callable[[], GuideMasks]
    ) -> tuple[SampledToken, ...]:
        sampling_rows = [SamplingRow(row.request_id, self._batch[row.request_id].token_ids) for row in rows]
        sampled = self._sampler.draw(self._model.logits(hidden), sampling_rows, masks)
        for token in sampled:
            if token.fault is None:
                self._batch[token.request_id].token_ids.append(token.token_id)
        return sampled

    def _prompt_logprobs(self, rows: tuple[ScheduledRequest, ...], hidden: torch.Tensor) -> tuple[PromptLogprobs, ...]:
        """Of the prompts' tokens in this step. hidden: the states before them, in order of `rows`."""
        if not len(hidden):
            return ()
        requests = [(row.request_id, self._batch[row.request_id]) for row in rows]
        spans = [(i, r, r.told_positions(row)) for row, (i, r) in zip(rows, requests, strict=True)]
        token_ids = [token for _, request, span in spans for token in request.token_ids[span.start : span.stop]]
        counts = [request.sampling.prompt_logprobs or 0 for _, request, span in spans for _ in span]
        told: list[TokenLogprobs] = []
        for start in range(0, len(hidden), _LOGPROB_ROWS):
            part = slice(start, start + _LOGPROB_ROWS)
            told += token_logprobs(self._model.logits(hidden[part]), token_ids[part], counts[part])
        ends = itertools.accumulate(len(span) for _, _, span in spans)
        return tuple(
            PromptLogprobs(request_id, span.start, tuple(told[end - len(span) : end]))
            for (request_id, _, span), end in zip(spans, ends, strict=True)
            if span
        )


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
