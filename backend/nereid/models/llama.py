"""Llama (Touvron et al. 2023): pre-norm decoder layers, rotary positions, grouped-query attention, gated SiLU.

Q, K and V are one product, gate and up another, so that a layer reads its weights in four products. Positions and
attention metadata are arguments; the model keeps weights and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from nereid.kv_cache.storage import KVCacheStorage
from nereid.model_config import ModelConfig
from nereid.model_input import ModelInput
from nereid.models.layers import Kernels, rotary_table
from nereid.models.weights import WeightReader
from nereid_kernels.paged_attention import paged_attention
from nereid_kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write

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
    """A loaded model. Its methods are pure but for the KV cache that `forward` is given."""

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, kernels: Kernels) -> None:
        """Take the weights from `reader` in `dtype`. Raises ModelLoadError where they do not fit `config`, and
        ConfigError where `kernels` cannot do with them what is asked."""
        self._config = config
        self._kernels = kernels
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = reader.read("model.embed_tokens.weight", vocab_shape).to(dtype)
        self._layers = [_load_layer(config, reader, index, dtype) for index in range(config.num_layers)]
        self._norm = reader.read("model.norm.weight", (config.hidden_size,)).to(dtype)
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else reader.read("lm_head.weight", vocab_shape).to(dtype)
        first = self._layers[0]
        kernels.prepare_products(first.qkv, first.output, first.gate_up, first.down, self._head)
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.max_position_embeddings)

    @staticmethod
    def ignored_tensors(config: ModelConfig) -> frozenset[str]:
        """Names that a checkpoint may hold beyond what the model needs."""
        stale = {f"model.layers.{i}.self_attn.{_STALE}" for i in range(config.num_layers)}
        return frozenset(stale | ({"lm_head.weight"} if config.tie_word_embeddings else set()))

    @torch.inference_mode()
    def forward(self, batch: ModelInput, cache: KVCacheStorage) -> torch.Tensor:
        """Hidden states [rows, hidden], after the last norm, of the tokens that `batch` asks for; writes the KV."""
        kernels, eps = self._kernels, self._config.rms_norm_eps
        cos_sin = self._rotary[batch.positions]  # [tokens, 2, head_dim]
        hidden = embedding(batch.token_ids, self._embedding)  # [tokens, hidden]
        normed = kernels.rms_norm(hidden, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, normed, cos_sin, batch, cache.layer(index))
            normed, hidden = kernels.add_rms_norm(attended, hidden, layer.mlp_norm, eps)
            inner = kernels.gated_silu(kernels.linear(normed, layer.gate_up))
            added = kernels.linear(inner, layer.down)
            if index + 1 < len(self._layers):
                normed, hidden = kernels.add_rms_norm(added, hidden, self._layers[index + 1].input_norm, eps)
        rows = batch.hidden_rows
        last, _ = kernels.add_rms_norm(added[rows], hidden[rows], self._norm, eps)
        return last

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] float32 of hidden states that `forward` gave."""
        return self._kernels.linear(hidden, self._head).float()

    def _attention(
        self,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ModelInput,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        kernels, head_dim = self._kernels, self._config.head_dim
        query = qk_norm_rope_kv_write(kernels.linear(hidden, layer.qkv), cos_sin, *cache, batch.kv_write)
        attended = paged_attention(
            query, *cache, batch.attention, scale=head_dim**-0.5, deterministic=kernels.deterministic
        )  # [tokens, heads, head_dim]
        return kernels.linear(attended.flatten(1), layer.output)


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
