"""Llama (Touvron et al. 2023): pre-norm decoder layers, rotary positions, grouped-query attention, gated SiLU.

Q, K and V are one product, gate and up another, so that a layer reads its weights in four products. The model keeps
weights and nothing else; what a step brings is the operations' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nereid.model_config import ModelConfig
from nereid.models.layers import rotary_table
from nereid.models.operations import Operations, Weights
from nereid.models.weights import WeightReader

_STALE = "rotary_emb.inv_freq"  # old checkpoints carry what is computed here
W = TypeVar("W")
X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class LlamaLayer(Generic[W]):
    """Weights of one decoder layer. The products': [out, in]; qkv is stacked along `out`."""

    input_norm: Tensor
    qkv: W
    output: W
    mlp_norm: Tensor
    gate_up: W
    down: W


class Llama(Generic[W]):
    """A family; see `Family`."""

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, weights: Weights[W]) -> None:
        """Take the weights from `reader` in `dtype`. Raises ModelLoadError where they do not fit `config`."""
        self._config = config
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = reader.read("model.embed_tokens.weight", vocab_shape).to(dtype)
        self._layers = [_load_layer(config, reader, index, dtype, weights) for index in range(config.num_layers)]
        self._norm = reader.read("model.norm.weight", (config.hidden_size,)).to(dtype)
        tied = config.tie_word_embeddings
        self.head = weights.keep_head(self._embedding if tied else reader.read("lm_head.weight", vocab_shape).to(dtype))
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.max_position_embeddings)

    @staticmethod
    def ignored_tensors(config: ModelConfig) -> frozenset[str]:
        """Names that a checkpoint may hold beyond what the model needs."""
        stale = {f"model.layers.{i}.self_attn.{_STALE}" for i in range(config.num_layers)}
        return frozenset(stale | ({"lm_head.weight"} if config.tie_word_embeddings else set()))

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    def product_weights(self) -> Iterable[W]:
        """See `Family`."""
        first = self._layers[0]
        return first.qkv, first.output, first.gate_up, first.down, self.head

    def hidden_states(self, ops: Operations[X, W], num_layers: int | None = None) -> X:
        """See `Family`."""
        eps, scale, layers = self._config.rms_norm_eps, self._config.head_dim**-0.5, self._layers[:num_layers]
        hidden = ops.embed(self._embedding)
        normed = ops.rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = ops.attend(ops.linear(normed, layer.qkv), self._rotary, index, scale)
            normed, hidden = ops.add_rms_norm(ops.linear(attended, layer.output), hidden, layer.mlp_norm, eps)
            added = ops.linear(ops.gated_silu(normed, layer.gate_up), layer.down)
            if index + 1 < len(layers):
                normed, hidden = ops.add_rms_norm(added, hidden, layers[index + 1].input_norm, eps)
        last, _ = ops.add_rms_norm(ops.hidden_rows(added), ops.hidden_rows(hidden), self._norm, eps)
        return last


def _load_layer(
    config: ModelConfig, reader: WeightReader, index: int, dtype: torch.dtype, weights: Weights[W]
) -> LlamaLayer[W]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(f"model.layers.{index}.{name}.weight", shape).to(dtype)

    qkv = [read(f"self_attn.{n}_proj", size, hidden) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))]
    return LlamaLayer(
        input_norm=read("input_layernorm", hidden),
        qkv=weights.keep(torch.cat(qkv)),
        output=weights.keep(read("self_attn.o_proj", hidden, q_size)),
        mlp_norm=read("post_attention_layernorm", hidden),
        gate_up=weights.keep_gated(read("mlp.gate_proj", inner, hidden), read("mlp.up_proj", inner, hidden)),
        down=weights.keep(read("mlp.down_proj", hidden, inner)),
    )
