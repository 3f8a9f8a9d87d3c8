"""RecordedModel: a family as a program of the native library, which carries out a whole step in one call.

Owns the programs: one for each cache that it was given (the engine's, and the one that steps are profiled on), and one
for logits. What a forward pass returns is overwritten by the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nereid.kv_memory.storage import KVCacheStorage
from nereid.model_input import ModelInput
from nereid.models.family import Family
from nereid.models.packed import Weight
from nereid_kernels.native.library import Library
from nereid_kernels.native.program import Buffer, LayerKV, Program, Rows, StepArrays

_LOGIT_ROWS = 64  # of a call


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    hidden: Buffer


class RecordedModel:
    """A loaded model, for one thread at a time."""

    def __init__(
        self, family: Family[Weight], library: Library, dtype: torch.dtype, max_tokens: int, max_hidden_rows: int
    ) -> None:
        """max_tokens, max_hidden_rows: of a step."""
        self._family = family
        self._library = library
        self._dtype = dtype
        self._most = max_tokens, max_hidden_rows
        self._programs: WeakKeyDictionary[KVCacheStorage, dict[int | None, _Recorded]] = WeakKeyDictionary()
        self._head = Program(library, dtype, 0, _LOGIT_ROWS)
        self._head_input = self._head.input(Rows.HIDDEN_ROWS, family.hidden_size)
        self._logits = self._head.matmul(self._head_input, family.head, wide=True)
        self._all_logits = torch.empty(0, self._logits.width)  # of more rows than one call's; kept for the next step

    @torch.inference_mode()
    def forward(self, batch: ModelInput, cache: KVCacheStorage, num_layers: int | None = None) -> Tensor:
        """See `registry.Model`."""
        programs = self._programs.setdefault(cache, {})
        if num_layers not in programs:
            programs[num_layers] = self._record(cache, num_layers)
        recorded = programs[num_layers]
        recorded.program.run(_arrays(batch))
        return recorded.hidden.memory[: len(batch.hidden_rows)]

    def _record(self, cache: KVCacheStorage, num_layers: int | None) -> _Recorded:
        program = Program(self._library, self._dtype, *self._most)
        return _Recorded(program, self._family.hidden_states(_Recorder(program, cache), num_layers))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`. Overwritten by the next call."""
        if len(hidden) <= _LOGIT_ROWS:
            return self._some_logits(hidden)
        if len(self._all_logits) < len(hidden):
            self._all_logits = torch.empty(len(hidden), self._logits.width)
        for start in range(0, len(hidden), _LOGIT_ROWS):
            part = slice(start, min(start + _LOGIT_ROWS, len(hidden)))
            self._all_logits[part] = self._some_logits(hidden[part])
        return self._all_logits[: len(hidden)]

    def _some_logits(self, hidden: Tensor) -> Tensor:
        self._head.run_on(self._head_input, hidden)
        return self._logits.memory[: len(hidden)]


class _Recorder:
    """See `Operations`."""

    def __init__(self, program: Program, cache: KVCacheStorage) -> None:
        self._program = program
        self._cache = cache

    def embed(self, table: Tensor) -> Buffer:
        return self._program.take_rows(table)

    def hidden_rows(self, x: Buffer) -> Buffer:
        return self._program.hidden_rows(x)

    def rms_norm(self, x: Buffer, weight: Tensor, eps: float) -> Buffer:
        return self._program.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Tensor, eps: float) -> tuple[Buffer, Buffer]:
        return self._program.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Buffer, weight: Weight) -> Buffer:
        return self._program.matmul(x, weight)

    def gated_silu(self, x: Buffer, weight: Weight) -> Buffer:
        return self._program.matmul(x, weight)

    def attend(self, qkv: Buffer, rotary: Tensor, layer: int, scale: float) -> Buffer:
        cache = self._cache.layer(layer)
        kv = LayerKV(cache.k, cache.v, cache.k_scale, cache.v_scale, cache.group, cache.window, cache.num_sink_tokens)
        self._program.rotary_kv_write(qkv, rotary, kv)
        heads = qkv.width // cache.k.shape[3] - 2 * cache.k.shape[1]
        return self._program.paged_attention(qkv, heads, kv, scale)


def _arrays(batch: ModelInput) -> StepArrays:
    attention = batch.groups[0].attention
    groups = [(group.kv_write.slot_mapping, group.attention.block_tables) for group in batch.groups]
    return StepArrays(
        batch.token_ids, batch.positions, batch.hidden_rows, attention.cu_query_lens, attention.seq_lens, groups
    )
