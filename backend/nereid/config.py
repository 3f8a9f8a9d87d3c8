"""EngineConfig: every setting of a deployment, read from `1/model.json`. Frozen; checked once, when it is made.

A key that is not a field here is refused by name, as is a value of the wrong type or out of range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nereid.errors import ConfigError, shorten, suggest

SETTINGS_FILE = "model.json"  # in a model's version folder
DTYPES = ("auto", "bfloat16", "float32")
KV_DTYPES = ("auto", "fp8_e4m3", "int8")
QUANTIZATIONS = ("none", "int8", "int4")
QUANTIZATION_GROUPS = {8: 128, 4: 32}  # by bits of a weight: so large, and no larger, costs next to no perplexity
ATTENTION_BACKENDS = ("auto", "cpu", "native", "triton_lang")
UNKNOWN_PARAMETERS = ("refuse", "warn")
_GIB = 1 << 30


def _number(
    default: float | None, low: float, high: float, *, optional: bool = False, fractional: bool = False, step: int = 1
) -> Any:
    rule = {"low": low, "high": high, "optional": optional, "fractional": fractional, "step": step}
    return field(default=default, metadata=rule)


def _flag(default: bool) -> Any:
    return field(default=default, metadata={"flag": True})


def _optional_text() -> Any:
    return field(default=None, metadata={"optional_text": True})


def _choice(default: str, allowed: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"choices": allowed})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    model: Hugging Face directory (absolute, or relative to model.json), `package:NAME`, or a hub id.
    dtype: `auto` is bfloat16, but float32 where PyTorch computes on a processor without instructions for bfloat16.
    kv_dtype: of the KV cache: `auto` is the model's; `fp8_e4m3` and `int8` take a byte a number, and 4 bytes for each
        token and KV head of a layer's keys, and of its values, for their scales, of int8 with offsets.
    attention_backend: what computes steps: `auto` is the native library on a CPU, or PyTorch where that cannot be
        built, and the Triton-lang kernels on a GPU; `native` and `cpu` are one of the former two, and `native` is
        refused where it cannot be built; `triton_lang` on the CPU needs TRITON_INTERPRET=1, and is for tests.
    deterministic: a request's tokens have the same bits whatever is served beside it and however its prompt is cut;
        slower; on the CPU only.
    attention_sink_tokens: layers with a window see so many of a text's first tokens besides, at their own positions
        (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453); their blocks stay. What such a layer computes is then meant
        to differ from the model's own code. 0: off; refused for a model without windows.
    quantization: of the products' weights, made once and kept in the cache folder; with the native library only. `none`
        keeps them as they are; `int4` keeps those that make logits in 8 bits.  quantization_group_size: inputs that
        share a scale, a multiple of 8; null: 128 of 8 bits, 32 of 4.
    num_threads: threads of one CPU operation; null takes torch's default.
    block_size: tokens a KV block.
    num_blocks, kv_cache_bytes, gpu_memory_utilization: size of the pool of KV blocks, by the first of them that is
        given; where none is, 0.9 of a GPU, and 1 GiB on the CPU, or less where there is less. num_blocks: in blocks,
        null block included.  kv_cache_bytes: in bytes.  gpu_memory_utilization: what this process may come to in all,
        as a share of the GPU's memory: weights, the largest step, the pool; on the CPU as a share of the machine's, or
        of what its control group lets it have, host_cache_bytes included.
    host_cache_bytes: memory beside the pool, for blocks that the pool has no room for; 0: none. Used as it is needed.
    disk_cache_dir: directory for blocks that outlive the process (absolute, or relative to model.json; made where only
        its last part is missing); null: none. Models and instances may share one. From what it holds prompts can be
        read, so it is made for this user alone.
    disk_cache_bytes: most that Nereid's files in that directory take together.
    max_model_len: longest prompt + output in tokens; null is what the model was trained for. Never above what the
        pool holds.
    max_num_seqs: requests running at once.  max_num_batched_tokens: token budget of a step.
    target_itl_ms: how long a step may take that streams wait for: prompts are then cut into chunks of so many tokens as
        were measured to fit. A step without prompts may take longer all the same. null: as the token budget allows.
    max_queue_size: waiting requests; one more is refused.  queue_timeout_ms: longest wait for the first step.
    priority_ageing_ms: how much waiting one level of a request's priority is worth; 0: priorities mean nothing.
    default_timeout_ms: deadline of a request that names none.  default_max_tokens: likewise max_tokens.
    max_logprobs: most that a request may ask for in logprobs and prompt_logprobs.
    unknown_parameters: what becomes of a request with a parameter of an unknown name: `refuse` it, or `warn` in the log
        and go on without it.
    step_timeout_s: a step that takes longer fails the engine.  drain_timeout_s: what running requests get to finish
        in when the model is unloaded or the server stops.
    tokenizer_threads: threads that encode long texts.
    otlp_traces_endpoint: where spans go by OTLP/HTTP, as a whole URL; null takes OpenTelemetry's environment variables,
        or else the URL of the server's own --trace-config. There are spans only where the server traces.
    """

    model: str
    dtype: str = _choice("auto", DTYPES)
    kv_dtype: str = _choice("auto", KV_DTYPES)
    attention_backend: str = _choice("auto", ATTENTION_BACKENDS)
    deterministic: bool = _flag(False)
    attention_sink_tokens: int = _number(0, 0, 1 << 20)
    quantization: str = _choice("none", QUANTIZATIONS)
    quantization_group_size: int | None = _number(None, 8, 1 << 16, optional=True, step=8)
    num_threads: int | None = _number(None, 1, 1024, optional=True)
    block_size: int = _number(16, 1, 256)
    kv_cache_bytes: int | None = _number(None, 1, 1 << 50, optional=True)
    gpu_memory_utilization: float | None = _number(None, 0, 1, optional=True, fractional=True)
    num_blocks: int | None = _number(None, 2, 1 << 31, optional=True)
    host_cache_bytes: int = _number(256 << 20, 0, 1 << 50)
    disk_cache_dir: str | None = _optional_text()
    disk_cache_bytes: int = _number(10 * _GIB, 1, 1 << 50)
    max_model_len: int | None = _number(None, 2, 1 << 31, optional=True)
    max_num_seqs: int = _number(64, 1, 4096)
    max_num_batched_tokens: int = _number(512, 1, 1 << 20)
    target_itl_ms: float | None = _number(None, 0.1, 1 << 20, optional=True, fractional=True)
    max_queue_size: int = _number(512, 1, 1 << 20)
    queue_timeout_ms: int = _number(60_000, 1, 1 << 40)
    priority_ageing_ms: int = _number(1000, 0, 1 << 40)
    default_timeout_ms: int = _number(300_000, 1, 1 << 40)
    default_max_tokens: int = _number(16, 1, 1 << 31)
    max_logprobs: int = _number(20, 0, 1024)
    unknown_parameters: str = _choice("refuse", UNKNOWN_PARAMETERS)
    step_timeout_s: float = _number(120.0, 0.001, 1 << 20, fractional=True)
    drain_timeout_s: float = _number(20.0, 0.0, 1 << 20, fractional=True)
    tokenizer_threads: int = _number(1, 1, 64)
    otlp_traces_endpoint: str | None = _optional_text()

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.metadata)

    def quantization_group(self, bits: int) -> int:
        """Inputs that share a scale. bits: of a quantised weight, 8 or 4."""
        return self.quantization_group_size or QUANTIZATION_GROUPS[bits]

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> EngineConfig:
        """The configuration that `settings` describes. Raises ConfigError, which names the key."""
        known = {f.name for f in fields(cls)}
        for key in settings:
            if key not in known:
                raise ConfigError(f"unknown setting {shorten(key)}{suggest(key, known)}")
        if "model" not in settings:
            raise ConfigError("setting 'model' is missing: a directory, package:NAME or a hub id")
        return cls(**settings)  # type: ignore[arg-type]  # types are checked in __post_init__

    def located(self, base: Path) -> EngineConfig:
        """The same, with an absolute disk_cache_dir. base: what a relative one is relative to."""
        if self.disk_cache_dir is None:
            return self
        return replace(self, disk_cache_dir=str((base / Path(self.disk_cache_dir).expanduser()).absolute()))

    def model_len(self, trained_len: int) -> int:
        """Longest prompt + output, whatever the pool holds. trained_len: what the model was trained for."""
        return min(self.max_model_len or trained_len, trained_len)

    @classmethod
    def load(cls, path: Path) -> EngineConfig:
        """Read `path` (model.json). Raises ConfigError, which names the file."""
        try:
            settings = _parsed(path.read_bytes())
            if not isinstance(settings, dict):
                raise ConfigError("must hold a JSON object")
            return cls.from_mapping(settings)
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _parsed(source: bytes) -> object:
    try:
        return json.loads(source.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not JSON in UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError("is not JSON that can be read: it is too deeply nested") from error


def _check(name: str, value: object, rule: Mapping[str, Any]) -> None:
    if "choices" in rule:
        if value not in rule["choices"]:
            raise ConfigError(f"{name}: got {shorten(value)}; allowed: {', '.join(rule['choices'])}")
    elif "low" in rule:
        _check_number(name, value, rule)
    elif "flag" in rule:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: got {shorten(value)}; allowed: true, false")
    elif not (rule.get("optional_text") and value is None) and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name}: got {shorten(value)}; allowed: a text that is not empty")


def _check_number(name: str, value: object, rule: Mapping[str, Any]) -> None:
    if value is None and rule["optional"]:
        return
    fractional = rule["fractional"]
    kind = "a number" if fractional else "a whole number"
    wanted = (int, float) if fractional else (int,)
    number = isinstance(value, wanted) and not isinstance(value, bool)
    if not number or not rule["low"] <= value <= rule["high"] or (not fractional and value % rule["step"]):
        steps = f" in steps of {rule['step']}" if rule["step"] > 1 else ""
        allowed = f"{kind} from {rule['low']} to {rule['high']}{steps}{' or null' if rule['optional'] else ''}"
        raise ConfigError(f"{name}: got {shorten(value)}; allowed: {allowed}")
