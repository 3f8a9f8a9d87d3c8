"""The versions of Triton-lang that kernels are proven with: the pinned one, and the newest.

Owns the folder of each that is not installed, made once in the cache folder. A process gets a version through its
environment, since one process can import only one.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from nereid.packages import fetch_wheel, require_space, unpack
from nereid.paths import build_once, cache_dir

PINNED, NEWEST = "3.6.0", "3.9.0"
VERSIONS = (PINNED, NEWEST)
ROOT = Path(__file__).resolve().parents[2]

_WHEEL_MIB = 275
_UNPACKED_MIB = 1000


def environment(version: str, *, interpret: bool) -> dict[str, str]:
    """The environment of a process that imports this version and the tests; fetches the version where it is missing.

    Raises PackageError where it cannot be had.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    folders = [] if _installed() == version else [str(_provide(version))]
    folders += [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(folders),
        "TRITON_CACHE_DIR": str(cache_dir() / "triton-lang-compiled"),
        "TRITON_DEFAULT_FP_FUSION": "1",  # what both versions do; the newest warns where it is not asked for
        "TRITON_INTERPRET": "1" if interpret else "0",
    }


def _installed() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _provide(version: str) -> Path:
    target = cache_dir() / f"triton-lang-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    return build_once(target, partial(_unpack_wheel, version), print)


def _unpack_wheel(version: str, folder: Path) -> None:
    require_space(folder, _UNPACKED_MIB + 2 * _WHEEL_MIB)
    wheel = fetch_wheel(f"triton=={version}", _WHEEL_MIB, folder, print)
    unpack(wheel, lambda _: True, folder)  # its metadata too, by which it finds its backends
    shutil.rmtree(wheel.parent)
