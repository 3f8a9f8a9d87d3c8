"""Makes a Triton server on this machine, without root and without Docker, from the wheel that carries one.

Always holds: the server lies in the cache, complete, with the Python stub of the running Python version; the wheel is
not installed, and nothing else of it is kept.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from functools import partial
from pathlib import Path

from nereid.errors import ConfigError
from nereid.packages import fetch_wheel, require_space, unpack
from nereid.paths import Progress, build_once, cache_dir

SERVER_VERSION = "2.51.0"
_WHEEL = "nvidia-pytriton==0.7.0"
_WHEEL_MIB = 53
_UNPACKED_MIB = 150
_TREE = "pytriton/tritonserver/"
_LIBRARIES = "nvidia_pytriton.libs/"
_STUBS = _TREE + "python_backend_stubs/"
_STUB = "triton_python_backend_stub"


def provision_server(progress: Progress) -> Path:
    """The `tritonserver` folder (bin, backends), fetched and unpacked unless it is there.

    Raises ConfigError where this Python cannot be embedded, PackageError or OSError where the server cannot be had.
    """
    require_libpython()
    target = cache_dir() / f"tritonserver-{SERVER_VERSION}-py{python_version()}"
    return build_once(target, partial(_build, progress=progress), progress) / _TREE


def python_version() -> str:
    """Such as 3.11: the stub must match it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def libpython_folder() -> Path | None:
    """Where a libpython lies that the system's loader does not find by itself; None where there is no such need."""
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    return folder if (folder / _libpython_name()).is_file() else None


def require_libpython() -> None:
    """Raises ConfigError where the shared library of this Python is missing: the server's stub is linked against it."""
    folder = libpython_folder()
    try:
        ctypes.CDLL(str(folder / _libpython_name()) if folder else _libpython_name())
    except OSError as error:
        raise ConfigError(
            f"{_libpython_name()} is missing, which the server embeds; apt install libpython{python_version()}"
        ) from error


def _libpython_name() -> str:
    return f"libpython{python_version()}.so.1.0"


def _build(folder: Path, *, progress: Progress) -> None:
    require_space(folder, _UNPACKED_MIB + 2 * _WHEEL_MIB)
    wheel = fetch_wheel(_WHEEL, _WHEEL_MIB, folder, progress)
    progress(f"unpacking tritonserver {SERVER_VERSION}")
    unpack(wheel, _is_wanted, folder)
    wheel.unlink()
    wheel.parent.rmdir()
    stub = folder / _TREE / "backends" / "python" / _STUB
    (folder / _STUBS / python_version() / _STUB).rename(stub)
    for program in (stub, folder / _TREE / "bin" / "tritonserver"):
        program.chmod(0o755)


def _is_wanted(member: str) -> bool:
    """The binary finds its libraries by a path relative to itself: both trees keep their places."""
    if member.startswith(_STUBS):
        return member == f"{_STUBS}{python_version()}/{_STUB}"
    return member.startswith((_TREE, _LIBRARIES))
