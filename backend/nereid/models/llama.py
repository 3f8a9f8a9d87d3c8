"""Llama (Touvron et al. 2023): pre-norm decoder layers, rotary positions, grouped-query attention, gated SiLU.

Q, K and V are one product, gate and up another, so that a layer reads its weights in four products. Positions and
attention metadata are arguments; the model keeps weights and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear

from nereid.kv_cache.storage import KVCacheStorage
from nereid.model_config import ModelConfig
from nereid.model_input import ModelInput
from nereid.models.layers import apply_rotary, gated_silu, rms_norm, rotary_table
from nereid.models.weights import WeightReader
from nereid_kernels.kv_write import kv_write
from nereid_kernels.paged_attention import paged_attention

_STALE = "rotary_emb.inv_freq"  # old checkpoints carry what is computed here


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one decoder layer, [out, in]; qkv and gate_up are stacked along `out`."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """A loaded model. `forward` is pure but for the KV cache that it is given."""

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype) -> None:
        """Take the weights from `reader` in `dtype`. Raises ModelLoadError where they do not fit `config`."""
        self._config = config
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = reader.read("model.embed_tokens.weight", vocab_shape).to(dtype)
        self._layers = [_load_layer(config, reader, index, dtype) for index in range(config.num_layers)]
        self._norm = reader.read("model.norm.weight", (config.hidden_size,)).to(dtype)
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else reader.read("lm_head.weight", vocab_shape).to(dtype)
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.max_position_embeddings).to(dtype)

    @staticmethod
    def ignored_tensors(config: ModelConfig) -> frozenset[str]:
        """Names that a checkpoint may hold beyond what the model needs."""
        stale = {f"model.layers.{i}.self_attn.{_STALE}" for i in range(config.num_layers)}
        return frozenset(stale | ({"lm_head.weight"} if config.tie_word_embeddings else set()))

    @torch.inference_mode()
    def forward(self, batch: ModelInput, cache: KVCacheStorage) -> torch.Tensor:
        """Logits [logits rows, vocabulary] float32 of the rows that `batch` asks for; writes the step's KV."""
        cos_sin = self._rotary[batch.positions]  # [tokens, 2, head_dim]
        hidden = embedding(batch.token_ids, self._embedding)  # [tokens, hidden]
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, self._config.rms_norm_eps)
            hidden = hidden + self._attention(layer, normed, cos_sin, batch, cache.layer(index))
            normed = rms_norm(hidden, layer.mlp_norm, self._config.rms_norm_eps)
            hidden = hidden + linear(gated_silu(linear(normed, layer.gate_up)), layer.down)
        last = rms_norm(hidden[batch.logits_rows], self._norm, self._config.rms_norm_eps)
        return linear(last, self._head).float()

    def _attention(
        self,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ModelInput,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        heads, kv_heads, head_dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        qkv = linear(hidden, layer.qkv).view(len(hidden), heads + 2 * kv_heads, head_dim)
        rotated = apply_rotary(qkv[:, : heads + kv_heads], cos_sin)
        query, key, value = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
        kv_write(key, value, *cache, batch.kv_write)
        attended = paged_attention(query, *cache, batch.attention, scale=head_dim**-0.5)
        return linear(attended.reshape(len(hidden), heads * head_dim), layer.output)


def _load_layer(config: ModelConfig, reader: WeightReader, index: int, dtype: torch.dtype) -> LlamaLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def read(name: str, *shape: int) -> torch.Tensor:
        return reader.read(f"model.layers.{index}.{name}.weight", shape).to(dtype)

    qkv = [read(f"self_attn.{n}_proj", size, hidden) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))]
    return LlamaLayer(
        input_norm=read("input_layernorm", hidden),
        qkv=torch.cat(qkv),
        output=read("self_attn.o_proj", hidden, q_size),
        mlp_norm=read("post_attention_layernorm", hidden),
        gate_up=torch.cat([read(f"mlp.{n}_proj", inner, hidden) for n in ("gate", "up")]),
        down=read("mlp.down_proj", hidden, inner),
    )
