"""Fetches files that come inside packages of the registry that pip is set up for. Owns the calls of `pip download`.

Always holds: no registry is named here (pip's own settings decide), nothing is installed, and pip's words are kept
in a log file that an error names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from nereid.errors import PackageError
from nereid.paths import Progress, cache_dir

_MIB = 1 << 20
_POLL_S = 0.1
_REPORT_S = 1.0


def fetch_wheel(requirement: str, size_mib: int, folder: Path, progress: Progress) -> Path:
    """Download the wheel of `requirement` (name==version, of about `size_mib`) into `folder`.

    Raises PackageError.
    """
    require_space(folder, 2 * size_mib)
    log = cache_dir() / "logs" / f"pip-{requirement.partition('==')[0]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    download = folder / "download"
    download.mkdir()
    if _run_pip(requirement, download, log, lambda mib: progress(f"{requirement}: {mib} of {size_mib} MB")) != 0:
        raise PackageError(f"cannot get {requirement}: {_reason(log)}; pip's log: {log}")
    return next(download.glob("*.whl"))


def unpack(wheel: Path, wanted: Callable[[str], bool], folder: Path) -> None:
    """Unpack the members of `wheel` whose names are `wanted`, with their permissions, into `folder`.

    Raises PackageError for a damaged wheel and OSError where `folder` cannot be written.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in filter(lambda m: wanted(m.filename), archive.infolist()):
                path = archive.extract(member, folder)
                os.chmod(path, (member.external_attr >> 16) & 0o777 | 0o600 if not member.is_dir() else 0o755)
    except zipfile.BadZipFile as error:
        raise PackageError(f"{wheel.name}: damaged: {error}") from error


def require_space(folder: Path, needed_mib: int) -> None:
    """Raises PackageError where the disk of `folder` has less than `needed_mib` left."""
    free_mib = shutil.disk_usage(folder).free // _MIB
    if free_mib < needed_mib:
        raise PackageError(f"no disk space: {cache_dir()} has {free_mib} MB left, {needed_mib} MB are needed")


def _run_pip(requirement: str, download: Path, log: Path, report: Callable[[int], None]) -> int:
    """pip's exit status. `report` hears the MB that have arrived."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--retries", "2", "--log", str(log), "--dest", str(download), requirement]
    # pip downloads to a temporary folder first: putting that here makes its growth visible, and keeps /tmp out of it.
    environment = {**os.environ, "TMPDIR": str(download)}
    quiet = subprocess.DEVNULL
    pip = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=environment)
    try:
        return _watch(pip, download, report)
    finally:
        pip.kill()
        pip.wait()


def _watch(pip: subprocess.Popen[bytes], download: Path, report: Callable[[int], None]) -> int:
    reported = time.monotonic()
    while (status := pip.poll()) is None:
        time.sleep(_POLL_S)
        if time.monotonic() - reported >= _REPORT_S:
            reported = time.monotonic()
            report(_largest(download) // _MIB)
    return status


def _largest(folder: Path) -> int:
    """Bytes of the largest file under `folder`, which another process is changing."""
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            largest = max(largest, path.lstat().st_size)
    return largest


def _reason(log: Path) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    if "No space left on device" in text:
        return f"no disk space left in {cache_dir()}"
    if "No matching distribution found" in text and "onnection" not in text:
        return "the package registry does not have it (for this Python and machine)"
    return "the package registry cannot be reached"
