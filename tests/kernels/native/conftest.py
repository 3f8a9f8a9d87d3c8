"""The variants of the native library that this processor can run."""

from __future__ import annotations

import pytest

from nereid.native import ensure_built
from nereid_kernels.native.build import BuildError, variants
from nereid_kernels.native.library import Library, fitting_variant


@pytest.fixture(params=[variant.name for variant in variants()])
def library(request: pytest.FixtureRequest) -> Library:
    names = [variant.name for variant in variants()]  # the best first: each processor runs those behind its own
    best, number = fitting_variant(), names.index(request.param)
    if best is None or number < names.index(best):
        pytest.skip(f"this processor cannot run {request.param}")
    try:
        return Library(ensure_built(print, variants()[number]))
    except BuildError as error:
        pytest.skip(f"no native library: {error}")
