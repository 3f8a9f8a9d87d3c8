"""The tiny random Llama of this folder's tests, and how many threads compute it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from nereid.native import ensure_built, open_library
from nereid_kernels.native.build import BuildError
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


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with the native library in it; without one the test is skipped."""
    try:
        open_library()
        folder = ensure_built(print).parent
    except (BuildError, OSError) as error:
        pytest.skip(f"no native library: {error}")
    cache = tmp_path / "nereid-cache"
    cache.mkdir()
    (cache / folder.name).symlink_to(folder)
    monkeypatch.setenv("NEREID_CACHE", str(cache))
    return cache


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models are computed by one: threads that wait for each other on busy cores take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if "smollm2_directory" in request.fixturenames else 1)
    yield
    torch.set_num_threads(before)
