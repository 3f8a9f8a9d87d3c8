"""What asks for the native library is refused where it cannot be had, by the setting's name; `auto` goes on without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.model_runner import choose_backend
from nereid.models.eager import EagerModel
from nereid.native import library_for
from tests.engine.tiny import SteppedEngine

WITHOUT = "allowed without the native library"
CUDA = torch.device("cuda")


def config(**settings: object) -> EngineConfig:
    return EngineConfig.from_mapping({"model": "x", **settings})


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a library that was built before, nor a g++ to build one with."""
    monkeypatch.setenv("NEREID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_native_is_refused_without_the_library(directory: Path) -> None:
    with pytest.raises(ConfigError, match=rf"attention_backend: got 'native'; {WITHOUT}: 'auto', 'cpu' \(no g\+\+ was"):
        SteppedEngine(directory, {"attention_backend": "native"})


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_refused_without_the_library(directory: Path, quantization: str) -> None:
    with pytest.raises(ConfigError, match=rf"quantization: got '{quantization}'; {WITHOUT}: 'none' \(no g\+\+ was"):
        SteppedEngine(directory, {"quantization": quantization})


@pytest.mark.usefixtures("no_compiler")
def test_auto_goes_on_without_the_library_and_says_why(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = SteppedEngine(directory)
    assert isinstance(engine.runner.model, EagerModel)
    assert "no native library, so that steps take longer: no g++ was found" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("NEREID_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=rf"attention_backend: got 'native'; .*{tmp_path}"):
        SteppedEngine(directory, {"attention_backend": "native"})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_refused_where_something_else_computes(directory: Path, quantization: str) -> None:
    refusal = f"quantization: got '{quantization}' with attention_backend"
    with pytest.raises(ConfigError, match=f"{refusal} 'cpu' on cpu; allowed: 'none'"):
        SteppedEngine(directory, {"quantization": quantization, "attention_backend": "cpu"})
    with pytest.raises(ConfigError, match=f"{refusal} 'auto' on cuda; allowed: 'none'"):
        library_for(config(quantization=quantization), CUDA)


def test_native_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="attention_backend: got 'native' for tensors on cuda; allowed: auto, triton"):
        choose_backend(config(attention_backend="native"), CUDA)
