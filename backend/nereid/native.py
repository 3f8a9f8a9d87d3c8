"""The CPU's native library: built once, where there is a compiler, and kept in Nereid's cache folder; who uses it.

Always holds: what a setting asks of it is refused where it cannot be had; only `auto` goes on without it.
`./nereid` calls this module when it sets up an environment (python -m nereid.native), so that no server has to wait.
With --all it builds the library for every processor of the machine's type: for an image that runs elsewhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.paths import Progress, build_once, cache_dir
from nereid_kernels.native.build import BuildError, Variant, build, key, variants
from nereid_kernels.native.library import Library, fitting_variant

_LOG = logging.getLogger(__name__)


def ensure_built(progress: Progress, variant: Variant | None = None) -> Path:
    """The library's file, in a folder of its own; of the variant for this processor where none is named.

    Raises BuildError, or OSError where the folder cannot be written.
    """
    variant = variant or _fitting()
    folder = build_once(cache_dir() / f"native-{key(variant)}", partial(build, variant), progress)
    return folder / f"{variant.name}.so"


def _fitting() -> Variant:
    name = fitting_variant()
    for variant in variants():
        if variant.name == name:
            return variant
    raise BuildError("there is none for this processor")


def open_library() -> Library:
    """The variant for this processor. Raises BuildError or OSError, which say why it cannot be had."""
    return Library(ensure_built(_LOG.info))


def library_for(config: EngineConfig, device: torch.device) -> Library | None:
    """What is to compute steps; None: something else does. Raises ConfigError where a setting needs it in vain."""
    if device.type != "cpu" or config.attention_backend not in ("auto", "native"):
        if config.quantization != "none":
            place = f"attention_backend {config.attention_backend!r} on {device}"
            raise ConfigError(f"quantization: got {config.quantization!r} with {place}; allowed: 'none'")
        return None
    try:
        return open_library()
    except (BuildError, OSError) as error:
        _refuse_what_needs_it(config, error)
        _LOG.warning("no native library, so that steps take longer: %s", error)
        return None


def _refuse_what_needs_it(config: EngineConfig, reason: Exception) -> None:
    without = "allowed without the native library"
    if config.attention_backend == "native":
        raise ConfigError(f"attention_backend: got 'native'; {without}: 'auto', 'cpu' ({reason})") from reason
    if config.quantization != "none":
        raise ConfigError(f"quantization: got {config.quantization!r}; {without}: 'none' ({reason})") from reason


def main(arguments: Sequence[str]) -> int:
    """Build it. 0 also where that cannot be done, since everything works without it."""
    try:
        for variant in variants() if "--all" in arguments else [None]:
            print(f"native library: {ensure_built(print, variant)}")
    except (BuildError, OSError) as error:
        print(f"native library: not built: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
