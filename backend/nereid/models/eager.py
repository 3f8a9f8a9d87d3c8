"""EagerModel: a family computed operation by operation, with PyTorch on a CPU or the Triton-lang kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from nereid.kv_memory.storage import KVCacheStorage
from nereid.model_input import ModelInput
from nereid.models.family import Family
from nereid.models.layers import Kernels
from nereid_kernels.paged_attention import paged_attention
from nereid_kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write


class StackedWeights:
    """Weights as they are; what is gated is stacked along `out`."""

    def keep(self, weight: Tensor) -> Tensor:
        return weight

    def keep_head(self, weight: Tensor) -> Tensor:
        return weight

    def keep_gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.cat((gate, up))


class EagerModel:
    """A loaded model. Its methods are pure but for the KV cache that `forward` is given."""

    def __init__(self, family: Family[Tensor], kernels: Kernels) -> None:
        """Raises ConfigError where `kernels` cannot do with the family's weights what is asked."""
        self._family = family
        self._kernels = kernels
        kernels.prepare_products(*family.product_weights())

    @torch.inference_mode()
    def forward(self, batch: ModelInput, cache: KVCacheStorage, num_layers: int | None = None) -> Tensor:
        """See `registry.Model`."""
        hidden: Tensor = self._family.hidden_states(_EagerOperations(self._kernels, batch, cache), num_layers)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return self._kernels.linear(hidden, self._family.head).float()


class _EagerOperations:
    """See `Operations`."""

    def __init__(self, kernels: Kernels, batch: ModelInput, cache: KVCacheStorage) -> None:
        self._kernels = kernels
        self._batch = batch
        self._cache = cache
        self._turns: dict[int, Tensor] = {}  # by table: those of the step's positions

    def embed(self, table: Tensor) -> Tensor:
        return embedding(self._batch.token_ids, table)

    def hidden_rows(self, x: Tensor) -> Tensor:
        return x[self._batch.hidden_rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.linear(x, weight)

    def gated_silu(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.gated_silu(self._kernels.linear(x, weight))

    def attend(self, qkv: Tensor, rotary: Tensor, layer: int, scale: float) -> Tensor:
        cache = self._cache.layer(layer)
        group = self._batch.groups[cache.group]
        if (cos_sin := self._turns.get(id(rotary))) is None:
            cos_sin = self._turns[id(rotary)] = rotary[self._batch.positions]  # [tokens, 2, rotary_dim]
        query = qk_norm_rope_kv_write(
            qkv, cos_sin, cache.k, cache.v, group.kv_write, k_scale=cache.k_scale, v_scale=cache.v_scale
        )
        attended = paged_attention(
            query, cache.k, cache.v, group.attention, scale, window=cache.window,
            num_sink_tokens=cache.num_sink_tokens, deterministic=self._kernels.deterministic,
            k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip
        return attended.flatten(1)  # [tokens, heads * head_dim]
