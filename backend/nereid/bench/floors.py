"""The least time that a machine can take for a decode step or a prefill, from bytes and operations alone. Pure.

A floor is the larger of two times: what has to be read, at the machine's bandwidth, and what has to be computed, at its
arithmetic bound (Williams, Waterman and Patterson 2009). Counted are weights, read once a step; keys and values of the
context, read once by each token; and two operations for each weight and token. Always holds: what is left out
(activations, norms, the first rows of embeddings) would only raise a floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereid.config import QUANTIZATION_GROUPS
from nereid.model_config import ModelConfig

_KV_BYTES = 2  # a number, in bfloat16 and float16
_BITS_OF_8, _BITS_OF_4 = (bits + 32 / QUANTIZATION_GROUPS[bits] for bits in (8, 4))  # 4 bytes for each group


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine can do. bandwidth: bytes a second.  arithmetic: operations a second."""

    bandwidth: float
    arithmetic: float


@dataclass(frozen=True, slots=True)
class WeightBits:
    """Bits a weight, scales included. logits: of the weights that make logits."""

    layers: float
    logits: float


WEIGHT_BITS = {
    "none": WeightBits(16, 16),
    "int8": WeightBits(_BITS_OF_8, _BITS_OF_8),
    "int4": WeightBits(_BITS_OF_4, _BITS_OF_8),
}
"""By EngineConfig's `quantization`."""


@dataclass(frozen=True, slots=True)
class Work:
    """bytes: to be read.  operations: to be computed."""

    bytes: float
    operations: float

    def floor_s(self, machine: Machine) -> float:
        return max(self.bytes / machine.bandwidth, self.operations / machine.arithmetic)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights in products, of all layers and of those that make logits; numbers that a token keeps in the KV cache;
    operations of attention for each pair of a token and one that it sees."""

    layer_weights: int
    logit_weights: int
    kv_numbers: int
    pair_operations: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSize:
        kv = config.num_kv_heads * config.head_dim
        queries = config.num_heads * config.head_dim
        attention = config.hidden_size * (2 * queries + 2 * kv)
        mlp = 3 * config.hidden_size * config.intermediate_size
        return cls(
            layer_weights=config.num_layers * (attention + mlp),
            logit_weights=config.hidden_size * config.vocab_size,
            kv_numbers=config.num_layers * 2 * kv,
            pair_operations=config.num_layers * 4 * queries,
        )


def decode_step(size: ModelSize, bits: WeightBits, contexts: Sequence[float]) -> Work:
    """One token for each sequence. contexts: how many tokens each of them sees."""
    weights = (size.layer_weights * bits.layers + size.logit_weights * bits.logits) / 8
    seen = sum(contexts)
    return Work(
        bytes=weights + seen * size.kv_numbers * _KV_BYTES,
        operations=2 * (size.layer_weights + size.logit_weights) * len(contexts) + seen * size.pair_operations,
    )


def prefill(size: ModelSize, bits: WeightBits, lengths: Sequence[int]) -> Work:
    """Prompts of these lengths, and the first token of each, as if in one step."""
    weights = (size.layer_weights * bits.layers + size.logit_weights * bits.logits) / 8
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    products = 2 * (size.layer_weights * sum(lengths) + size.logit_weights * len(lengths))
    return Work(bytes=weights, operations=products + pairs * size.pair_operations)
