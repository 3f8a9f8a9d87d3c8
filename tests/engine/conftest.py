"""The tiny random Llama of this folder's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.engine.tiny import make_tiny_llama


@pytest.fixture(scope="package")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.LlamaForCausalLM]:
    """A Hugging Face directory, and the model as transformers computes it."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    return directory, make_tiny_llama(directory)


@pytest.fixture(scope="package")
def directory(tiny_llama: tuple[Path, transformers.LlamaForCausalLM]) -> Path:
    return tiny_llama[0]


@pytest.fixture(scope="package")
def model(tiny_llama: tuple[Path, transformers.LlamaForCausalLM]) -> transformers.LlamaForCausalLM:
    return tiny_llama[1]
