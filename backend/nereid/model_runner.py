"""ModelRunner: runs plans on one device: plan -> tensors -> model -> hidden states -> logits -> tokens.

Lives behind the executor seam. Owns the model, the KV cache's memory and what moves its blocks, the batch state and the
sampler. Used by the executor's thread alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
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
from nereid.config import QUANTIZATION_GROUPS, EngineConfig
from nereid.errors import ConfigError
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_memory.budget import PoolBudget
from nereid.kv_memory.groups import KVCacheGroup, groups_of
from nereid.kv_memory.storage import KVCacheStorage, page_bytes, sizes
from nereid.memory.meters import meter_of
from nereid.model_config import ModelConfig
from nereid.model_input import BatchState
from nereid.models.eager import EagerModel, StackedWeights
from nereid.models.layers import Kernels
from nereid.models.packed import Packing, load_packed
from nereid.models.recorded import RecordedModel
from nereid.models.registry import Model, load_family
from nereid.native import library_for
from nereid.profiling import SCRATCH_BLOCKS, Profile, StepLimits, not_profiled, profile
from nereid.request import TokenLogprobs
from nereid.sampling.logprobs import token_logprobs
from nereid.sampling.sampler import Sampler, SamplingRow
from nereid.tiers import open_tiers
from nereid_kernels.backends import describe, pick
from nereid_kernels.native.library import Library

_LOG = logging.getLogger(__name__)
_LOGPROB_ROWS = 64  # positions of prompts whose logits are in memory at a time


class ModelRunner:
    """One model on the CPU."""

    def __init__(self, directory: Path, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and make the KV cache. Raises ConfigError or ModelLoadError."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = torch.device("cpu")
        self._backend = choose_backend(config, device)
        library = library_for(config, device)
        dtype = choose_dtype(config.dtype, native=library is not None)
        kv_dtype, num_sink_tokens = choose_kv_dtype(config.kv_dtype, dtype), choose_sink_tokens(config, model_config)
        groups = groups_of(model_config, config.block_size, kv_dtype, num_sink_tokens)
        layout = BlockLayout(config.block_size, tuple(group.rule for group in groups), config.max_num_batched_tokens)
        budget = PoolBudget(config, layout, page_bytes(groups), on_gpu=device.type != "cpu")
        max_len = budget.max_model_len(model_config.max_position_embeddings)  # refused before the weights are read
        self._model: Model
        if library:
            most = config.max_num_batched_tokens, config.max_num_batched_tokens + config.max_num_seqs
            packed = load_packed(directory, model_config, dtype, _packing(config, library))
            self._model = RecordedModel(packed, library, dtype, *most)
        else:
            stacked = load_family(directory, model_config, dtype, StackedWeights())
            self._model = EagerModel(stacked, Kernels(self._backend, deterministic=config.deterministic))
        self._batch = BatchState(len(groups), "native" if library else self._backend)
        self._sampler = Sampler(model_config.eos_token_ids, model_config.vocab_size, self._backend)
        profiled = self._profile(groups, StepLimits.of(config, groups, max_len), device)
        size = budget.size(profiled.memory)
        self._cache = KVCacheStorage(groups, size.num_blocks, device)
        computed_by = _computed_by(config, library, self._backend)
        tiers = open_tiers(directory, config, groups, dtype, self._cache, self._backend, computed_by)
        self._transfer = tiers.transfer
        self.capacity = Capacity(
            size.num_blocks, budget.page_bytes, config.block_size, layout.groups,
            num_host_blocks=self._transfer.num_host_blocks, rates=tiers.rates(profiled.prefill_tokens_per_s),
            fingerprint=tiers.fingerprint, stored_names=tiers.stored_names,
        )  # fmt: skip
        if size.warning:
            _LOG.warning("KV cache: %s", size.warning)
        _LOG.info(
            "%s, %s with %d threads%s; KV cache: %d blocks of %d bytes by %s; %s",
            dtype, f"the native library ({library.variant})" if library else describe(device, self._backend),
            torch.get_num_threads(),
            ", deterministic" if config.deterministic else "", size.num_blocks, budget.page_bytes, size.decided_by,
            sizes(groups, groups_of(model_config, config.block_size, dtype)),
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
        failed_loads = self._transfer.run(plan.kv_ops)
        result = self._compute(plan, self._cache, masks)
        return replace(result, failed_loads=failed_loads) if failed_loads else result

    def close(self) -> None:
        """Write to disk what waits for it, within some seconds; nothing may be run any more."""
        self._transfer.close()

    def _compute(
        self,
        plan: SchedulerOutput,
        cache: KVCacheStorage,
        masks: Callable[[], GuideMasks],
        num_layers: int | None = None,
    ) -> StepResult:
        if not plan.scheduled:
            return StepResult(plan.step, ())
        hidden = self._model.forward(self._batch.build(plan.scheduled, cache), cache, num_layers)
        sampling = [row for row in plan.scheduled if row.samples]
        told = self._prompt_logprobs(plan.scheduled, hidden[len(sampling) :])  # before tokens are drawn
        sampled = self._sample(sampling, hidden[: len(sampling)], masks) if sampling else ()
        return StepResult(plan.step, sampled, told)

    def _profile(self, groups: tuple[KVCacheGroup, ...], limits: StepLimits, device: torch.device) -> Profile:
        """Run steps on a cache of their own, which is gone afterwards."""
        if self._backend != "cpu" and device.type == "cpu":
            return not_profiled(meter_of(device))
        scratch = KVCacheStorage(groups, SCRATCH_BLOCKS, device)
        scratch.pages.zero_()

        @torch.inference_mode()
        def compute(plan: SchedulerOutput, num_layers: int | None) -> None:
            self._batch.apply(plan)
            self._sampler.apply(plan)
            self._compute(plan, scratch, _no_masks, num_layers)

        return profile(compute, meter_of(device), limits)

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


def _no_masks() -> GuideMasks:
    raise AssertionError("no request that is made up has a guide")


def _computed_by(config: EngineConfig, library: Library | None, backend: str) -> str:
    """What computes KV, and with which weights."""
    return backend if library is None else ", ".join((f"native {library.variant}", *_packing(config, library).facts))


def _packing(config: EngineConfig, library: Library) -> Packing:
    groups = {bits: config.quantization_group(bits) for bits in QUANTIZATION_GROUPS}
    return Packing(library.tile, config.quantization, groups)


def choose_backend(config: EngineConfig, device: torch.device) -> str:
    """What runs the kernels that are called one by one. Raises ConfigError where that cannot run here."""
    try:
        backend = pick(device, config.attention_backend)
    except ValueError as error:
        raise ConfigError(f"attention_{error}") from error
    if backend == "native":  # it carries out whole steps; PyTorch does what is called besides
        backend = "cpu"
    if config.deterministic and backend != "cpu":
        raise ConfigError(f"deterministic: got true with attention_backend {backend}; allowed: false")
    return backend


def choose_sink_tokens(config: EngineConfig, model_config: ModelConfig) -> int:
    """How many first tokens layers with a window see besides. Raises ConfigError where the model has no such layer."""
    if config.attention_sink_tokens and not any(model_config.layer_windows):
        raise ConfigError(
            f"attention_sink_tokens: got {config.attention_sink_tokens}; allowed for a model without windows: 0"
        )
    return config.attention_sink_tokens


def choose_dtype(setting: str, *, native: bool) -> torch.dtype:
    """The dtype of weights and KV. `auto`: bfloat16, but where PyTorch would compute in it without instructions for it,
    which is slower than float32. native: the library computes, and reads half of the bytes at the same speed."""
    if setting == "auto":
        return torch.bfloat16 if native or _has_bfloat16() else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[setting]


def choose_kv_dtype(setting: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values in the cache; dtype: the model's."""
    return {"auto": dtype, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}[setting]


def _has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
