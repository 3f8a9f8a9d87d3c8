"""The variants of the native library that this processor can run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nereid.native import ensure_built
from nereid_kernels.native.build import BuildError, variants
from nereid_kernels.native.library import Library, fitting_variant


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return ensure_built(print)
    except BuildError as error:
        pytest.skip(f"no native library: {error}")


@pytest.fixture(params=[variant.name for variant in variants()])
def library(folder: Path, request: pytest.FixtureRequest) -> Library:
    names = [variant.name for variant in variants()]  # the best first: each processor runs those behind its own
    best = fitting_variant()
    if best is None or names.index(request.param) < names.index(best):
        pytest.skip(f"this processor cannot run {request.param}")
    return Library(folder / f"{request.param}.so")
