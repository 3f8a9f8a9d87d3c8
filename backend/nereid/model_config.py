"""ModelConfig: what a Hugging Face directory says of its model, read right or refused. Frozen.

Owns the reading of config.json and generation_config.json; nothing else in Nereid opens them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nereid.errors import ModelLoadError, shorten

_LOG = logging.getLogger(__name__)
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM")
_DEFAULT_ROPE_THETA = 10_000.0
# What transformers takes for a key that is left out, where a family differs from Llama.
_MISTRAL = MappingProxyType({"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096})
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"MistralForCausalLM": _MISTRAL, "MinistralForCausalLM": _MISTRAL}
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder-only model. Lengths are in tokens, sizes in elements.

    layer_windows: by layer, how many of the latest tokens a token sees, itself included; 0 is all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    layer_windows: tuple[int, ...]

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read `directory`. Raises ModelLoadError, which names the file and the key."""
        path = directory / "config.json"
        raw = _read_json(path)
        if raw is None:
            raise ModelLoadError(f"{path}: no such file")
        try:
            return cls.from_mapping(raw, _read_json(directory / "generation_config.json") or {})
        except KeyError as error:
            raise ModelLoadError(f"{path}: key {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise ModelLoadError(f"{path}: {error}") from error

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        """The configuration in config.json's and generation_config.json's objects."""
        architecture = (raw.get("architectures") or [None])[0]
        if architecture not in SUPPORTED_ARCHITECTURES:
            supported = ", ".join(SUPPORTED_ARCHITECTURES)
            raise ModelLoadError(f"architecture {shorten(architecture)} is not supported; supported: {supported}")
        _refuse_unsupported(raw)
        raw = {**_DEFAULTS.get(architecture, {}), **raw}
        heads = int(raw["num_attention_heads"])
        return cls(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_ids(raw, generation),
            bos_token_id=next(iter(_ids(raw.get("bos_token_id"))), None),
            layer_windows=_layer_windows(raw, architecture),
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The union of both files'; ids that the model cannot give are left out, with a warning."""
    ids = {*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    outside = {i for i in ids if not 0 <= i < int(raw["vocab_size"])}
    if outside:
        _LOG.warning("eos_token_id: %s lie outside the vocabulary and are ignored", sorted(outside))
    return tuple(sorted(ids - outside))


def _rope_theta(raw: Mapping[str, Any]) -> float:
    # transformers 5 moved rope_theta into rope_parameters.
    return float((raw.get("rope_parameters") or raw).get("rope_theta") or _DEFAULT_ROPE_THETA)


def _layer_windows(raw: Mapping[str, Any], architecture: str) -> tuple[int, ...]:
    """By layer. Mistral gives all layers its window; Ministral's layer_types say which have it."""
    num_layers = int(raw["num_hidden_layers"])
    if architecture not in _DEFAULTS:  # Llama's own code looks at neither key
        return (0,) * num_layers
    window, types = raw["sliding_window"], raw.get("layer_types")
    if window is not None and (type(window) is not int or window < 1):
        raise ModelLoadError(f"sliding_window: got {shorten(window)}; allowed: a whole number from 1, or null")
    if types is None:
        return (window or 0,) * num_layers
    _check_layer_types(types, num_layers, window, architecture)
    return tuple((window or 0) if kind == _SLIDING else 0 for kind in types)


def _check_layer_types(types: Any, num_layers: int, window: int | None, architecture: str) -> None:
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelLoadError(f"layer_types: got {shorten(types)}; allowed: a list of {num_layers}, one a layer")
    # Mistral's own code does not look at them: a model that they say something else of was meant otherwise.
    allowed = [_FULL] if window is None else [_SLIDING] if architecture == "MistralForCausalLM" else [_FULL, _SLIDING]
    for index, kind in enumerate(types):
        if kind not in allowed:
            raise ModelLoadError(
                f"layer_types[{index}]: got {shorten(kind)}; allowed for {architecture} with sliding_window "
                f"{shorten(window)}: {', '.join(allowed)}"
            )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Refuse what would load and then compute something else."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refusals = {
        "rope type": (rope_type, ("default",)),
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (raw.get("attention_bias", False), (False,)),
        "mlp_bias": (raw.get("mlp_bias", False), (False,)),
        "quantization_config": (raw.get("quantization_config"), (None,)),
    }
    for name, (value, allowed) in refusals.items():
        if value not in allowed:
            raise ModelLoadError(f"{name} {shorten(value)} is not supported; supported: {allowed[0]}")
