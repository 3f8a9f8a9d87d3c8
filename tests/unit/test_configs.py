"""EngineConfig and ModelConfig: read right, or refused with the key's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from nereid.config import EngineConfig
from nereid.errors import ConfigError, ModelLoadError
from nereid.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from nereid.models import registry

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip


def test_a_configuration_is_its_defaults_and_what_is_given(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"model": "package:x", "max_num_seqs": 3, "drain_timeout_s": 1, "otlp_traces_endpoint": null}')
    config = EngineConfig.load(path)
    assert (config.model, config.max_num_seqs, config.block_size, config.drain_timeout_s) == ("package:x", 3, 16, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"model\.json: is not JSON: Expecting property name .*: line 1 column 2"),
        ("", r"model\.json: is not JSON: Expecting value"),
        ("\n# a comment", r"model\.json: is not JSON: Expecting value: line 2"),
        ('{"model": "x"} x', r"model\.json: is not JSON: Extra data"),
        ('{"model": "x",}', r"model\.json: is not JSON: "),
        ('{"model": "\udcff"}', r"model\.json: is not JSON in UTF-8: invalid start byte at byte 11"),
        ("[" * 100_000, r"model\.json: is not JSON that can be read: it is too deeply nested"),
        ("[]", "must hold a JSON object"),
        ("{}", "'model' is missing"),
        ('{"model": "x", "block_sise": 16}', "unknown setting 'block_sise' .did you mean 'block_size'"),
        ('{"model": "x", "zzz": 1}', "unknown setting 'zzz'$"),
        ('{"model": ""}', "model: got ''"),
        ('{"model": 5}', "model: got 5"),
        ('{"model": "x", "dtype": "int4"}', "dtype: got 'int4'; allowed: auto, bfloat16, float32"),
        ('{"model": "x", "dtype": ["auto"]}', "dtype: got"),
        ('{"model": "x", "kv_dtype": "fp8"}', "kv_dtype: got 'fp8'; allowed: auto, fp8_e4m3, int8"),
        ('{"model": "x", "block_size": 0}', "block_size: got 0; allowed: a whole number from 1 to 256"),
        ('{"model": "x", "block_size": 16.0}', "block_size: got 16.0"),
        ('{"model": "x", "kv_cache_bytes": 0}', "kv_cache_bytes: got 0; allowed: a whole number from 1 to .* or null"),
        (
            '{"model": "x", "gpu_memory_utilization": 1.1}',
            "gpu_memory_utilization: got 1.1; allowed: a number from 0 to 1 or null",
        ),
        ('{"model": "x", "gpu_memory_utilization": "0.9"}', "gpu_memory_utilization: got '0.9'"),
        ('{"model": "x", "gpu_memory_utilization": true}', "gpu_memory_utilization: got True"),
        ('{"model": "x", "gpu_memory_utilization": NaN}', "gpu_memory_utilization: got nan"),
        ('{"model": "x", "max_num_seqs": true}', "max_num_seqs: got True"),
        ('{"model": "x", "max_num_seqs": null}', "max_num_seqs: got None"),
        ('{"model": "x", "otlp_traces_endpoint": ""}', "otlp_traces_endpoint: got ''"),
        ('{"model": null}', "model: got None"),
        ('{"model": "x", "unknown_parameters": "drop"}', "unknown_parameters: got 'drop'; allowed: refuse, warn"),
        ('{"model": "x", "max_logprobs": -1}', "max_logprobs: got -1"),
        ('{"model": "x", "drain_timeout_s": NaN}', "drain_timeout_s: got nan"),
        ('{"model": "x", "disk_cache_dir": ""}', "disk_cache_dir: got ''"),
        ('{"model": "x", "host_cache_bytes": -1}', "host_cache_bytes: got -1; allowed: a whole number from 0 to"),
        ('{"model": "x", "disk_cache_bytes": 0}', "disk_cache_bytes: got 0; allowed: a whole number from 1 to"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load(path)


def test_a_relative_directory_starts_at_model_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    cases = {None: None, "kv": "/models/m/1/kv", "/kv": "/kv", "~/kv": "/home/me/kv", "../kv": "/models/m/1/../kv"}
    for setting, expected in cases.items():
        config = EngineConfig.from_mapping({"model": "x", "disk_cache_dir": setting})
        assert config.located(Path("/models/m/1")).disk_cache_dir == expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.json"):
        EngineConfig.load(tmp_path / "model.json")


def test_head_dim_is_derived_unless_it_is_given() -> None:
    assert ModelConfig.from_mapping(LLAMA, {}).head_dim == 16
    assert ModelConfig.from_mapping({**LLAMA, "head_dim": 32}, {}).head_dim == 32


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 7], {}, (2, 7)),
        (None, {"eos_token_id": 5}, (5,)),
        (2, {"eos_token_id": [5, 2]}, (2, 5)),
        (None, {}, ()),
        ([2, 100, -1], {}, (2,)),
    ],
)
def test_end_of_sequence_ids_are_the_union_of_both_files(
    config: object, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert ModelConfig.from_mapping({**LLAMA, "eos_token_id": config}, generation).eos_token_ids == expected


def test_rope_theta_is_found_in_either_spelling() -> None:
    assert ModelConfig.from_mapping({**LLAMA, "rope_theta": 5e5}, {}).rope_theta == 5e5
    parameters = {"rope_theta": 5e5, "rope_type": "default"}
    assert ModelConfig.from_mapping({**LLAMA, "rope_parameters": parameters}, {}).rope_theta == 5e5
    assert ModelConfig.from_mapping(LLAMA, {}).rope_theta == 1e4


MISTRAL, MINISTRAL = ({**LLAMA, "architectures": [f"{name}ForCausalLM"]} for name in ("Mistral", "Ministral"))


@pytest.mark.parametrize(
    ("raw", "change", "expected"),
    [
        (LLAMA, {"sliding_window": 7}, (0, 0)),  # Llama's own code does not look at it
        (MISTRAL, {"sliding_window": 7}, (7, 7)),
        (MISTRAL, {"sliding_window": None}, (0, 0)),
        (MISTRAL, {}, (4096, 4096)),
        (MISTRAL, {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2}, (7, 7)),
        (MINISTRAL, {"sliding_window": 7}, (7, 7)),
        (MINISTRAL, {"sliding_window": None}, (0, 0)),
        (MINISTRAL, {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, (0, 7)),
        (MINISTRAL, {"layer_types": ["sliding_attention", "full_attention"]}, (4096, 0)),
        (MINISTRAL, {"sliding_window": None, "layer_types": ["full_attention"] * 2}, (0, 0)),
    ],
)
def test_windows_are_read_by_layer(raw: dict[str, Any], change: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_mapping({**raw, **change}, {}).layer_windows == expected


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (MISTRAL, {"sliding_window": 0}, "sliding_window: got 0; allowed: a whole number from 1, or null"),
        (MISTRAL, {"sliding_window": 4096.0}, "sliding_window: got 4096.0"),
        (MISTRAL, {"sliding_window": True}, "sliding_window: got True"),
        (MISTRAL, {"layer_types": ["sliding_attention", "full_attention"]}, r"layer_types\[1\]: got 'full_attention'"),
        (MINISTRAL, {"sliding_window": -1}, "sliding_window: got -1"),
        (MINISTRAL, {"layer_types": ["sliding_attention"]}, "layer_types: got .*; allowed: a list of 2, one a layer"),
        (MINISTRAL, {"layer_types": "full_attention"}, "layer_types: got 'full_attention'"),
        (
            MINISTRAL,
            {"layer_types": ["full_attention", "chunked_attention"]},
            r"layer_types\[1\]: got 'chunked_attention'; allowed for MinistralForCausalLM with sliding_window 4096: "
            "full_attention, sliding_attention",
        ),
        (
            MINISTRAL,
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            r"layer_types\[0\]: got 'sliding_attention'; .* with sliding_window None: full_attention",
        ),
    ],
)
def test_windows_that_make_no_sense_are_named(raw: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_mapping({**raw, **change}, {})


def test_what_mistral_leaves_out_is_what_transformers_takes() -> None:
    raw = {
        key: value for key, value in MISTRAL.items() if key not in ("num_key_value_heads", "max_position_embeddings")
    }
    for name, theirs in ("Mistral", transformers.MistralConfig()), ("Ministral", transformers.MinistralConfig()):
        config = ModelConfig.from_mapping({**raw, "architectures": [f"{name}ForCausalLM"]}, {})
        assert config.num_kv_heads == theirs.num_key_value_heads
        assert config.max_position_embeddings == theirs.max_position_embeddings
        assert config.layer_windows == (theirs.sliding_window,) * 2


def test_every_supported_architecture_has_a_class() -> None:
    assert set(registry.ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            f"'MambaForCausalLM' is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
        ),
        ({"architectures": None}, "None is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": "big"}, r"config\.json"),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.load(tmp_path)


def test_a_missing_key_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}))
    with pytest.raises(ModelLoadError, match="'vocab_size' is missing"):
        ModelConfig.load(tmp_path)
