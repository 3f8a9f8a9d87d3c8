"""Where the kernels run: in the interpreter, whose faults are mended first, or on a GPU, then the default device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nereid_kernels.launch import INTERPRETER, Config, choose
from tests.kernels.triton_lang.devices import ON_GPU, Reserve

if ON_GPU:
    torch.set_default_device("cuda")
else:
    from tests.kernels.interpreter_shim import install

    install()
    torch.set_num_threads(1)  # the interpreter's tensors are small, and several processes share the cores


@pytest.fixture(autouse=ON_GPU)
def _split_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's rows of the launch table split long contexts alone; here those of the tests are split, as by the
    interpreter's rows."""
    from nereid_kernels.triton_lang import mla_attention, paged_attention

    def choose_early_splits(kernel: str, architecture: str, **problem: Any) -> Config:
        config = choose(kernel, architecture, **problem)
        if "MIN_SPLIT" not in config.tiles:
            return config
        tile = config.tiles.get("BLOCK_N", 128)  # no kernel has a wider one
        shortest = max(choose(kernel, INTERPRETER).tiles["MIN_SPLIT"], tile)
        return replace(config, tiles={**config.tiles, "MIN_SPLIT": shortest})

    for kernels in (mla_attention, paged_attention):
        monkeypatch.setattr(kernels, "choose", choose_early_splits)


@pytest.fixture
def reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reserve]:
    """Makes tensors [size] with arbitrary values that are larger than the memory: in sparse files, of which only the
    pages that are written exist; on a GPU in its memory."""
    files: list[Path] = []

    def make(size: int, dtype: torch.dtype) -> Tensor:
        if ON_GPU:
            return torch.empty(size, dtype=dtype)
        files.append(tmp_path / f"{len(files)}")
        return torch.from_file(str(files[-1]), shared=True, size=size, dtype=dtype)

    if not ON_GPU:
        from triton.runtime import interpreter

        # The interpreter copies arguments back from the CPU, here to themselves: that would write every page.
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    yield make
    for file in files:
        assert file.stat().st_blocks * 512 < 1 << 20, "more was written than what was meant"
