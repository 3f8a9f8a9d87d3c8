"""EngineConfig: every setting of a deployment, read from `1/model.json`. Frozen; checked once, when it is made.

A key that is not a field here is refused by name, as is a value of the wrong type or out of range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nereid.errors import ConfigError, shorten, suggest

SETTINGS_FILE = "model.json"  # in a model's version folder
DTYPES = ("auto", "bfloat16", "float32")
ATTENTION_BACKENDS = ("auto", "cpu", "triton_lang")
UNKNOWN_PARAMETERS = ("refuse", "warn")
_GIB = 1 << 30


def _number(default: float | None, low: float, high: float, *, optional: bool = False) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "optional": optional})


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
    dtype: `auto` is bfloat16 where the processor computes in it, else float32.
    attention_backend: what runs KV writes, attention, norms and sampling: `auto` is PyTorch on the CPU and the
        Triton-lang kernels on a GPU; `triton_lang` on the CPU needs TRITON_INTERPRET=1, and is for tests.
    deterministic: a request's tokens have the same bits whatever is served beside it and however its prompt is cut;
        slower; on the CPU only.
    num_threads: threads of one CPU operation; null takes torch's default.
    block_size: tokens a KV block.  kv_cache_bytes: size of the pool.  num_blocks: that in blocks, null block included;
        goes before kv_cache_bytes.
    max_model_len: longest prompt + output in tokens; null is what the model was trained for. Never above what the
        pool holds.
    max_num_seqs: requests running at once.  max_num_batched_tokens: token budget of a step.
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
    attention_backend: str = _choice("auto", ATTENTION_BACKENDS)
    deterministic: bool = _flag(False)
    num_threads: int | None = _number(None, 1, 1024, optional=True)
    block_size: int = _number(16, 1, 256)
    kv_cache_bytes: int = _number(_GIB, 1, 1 << 50)
    num_blocks: int | None = _number(None, 2, 1 << 31, optional=True)
    max_model_len: int | None = _number(None, 2, 1 << 31, optional=True)
    max_num_seqs: int = _number(64, 1, 4096)
    max_num_batched_tokens: int = _number(512, 1, 1 << 20)
    max_queue_size: int = _number(512, 1, 1 << 20)
    queue_timeout_ms: int = _number(60_000, 1, 1 << 40)
    priority_ageing_ms: int = _number(1000, 0, 1 << 40)
    default_timeout_ms: int = _number(300_000, 1, 1 << 40)
    default_max_tokens: int = _number(16, 1, 1 << 31)
    max_logprobs: int = _number(20, 0, 1024)
    unknown_parameters: str = _choice("refuse", UNKNOWN_PARAMETERS)
    step_timeout_s: float = _number(120.0, 0.001, 1 << 20)
    drain_timeout_s: float = _number(20.0, 0.0, 1 << 20)
    tokenizer_threads: int = _number(1, 1, 64)
    otlp_traces_endpoint: str | None = _optional_text()

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.metadata)

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
    fractional = name.endswith("_s")
    kind = "a number" if fractional else "a whole number"
    wanted = (int, float) if fractional else (int,)
    if isinstance(value, bool) or not isinstance(value, wanted) or not rule["low"] <= value <= rule["high"]:
        allowed = f"{kind} from {rule['low']} to {rule['high']}{' or null' if rule['optional'] else ''}"
        raise ConfigError(f"{name}: got {shorten(value)}; allowed: {allowed}")
