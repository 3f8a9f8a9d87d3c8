"""Where Nereid keeps what it makes once and uses again: the server, converted models, logs.

Always holds: a folder made by `build_once` is complete, or it is not there. It is built beside its final place and
renamed at the end, under a lock, so that neither an interrupt nor a second process can leave or see half of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]
"""Told one short line each time a long step starts or gets further."""


def cache_dir() -> Path:
    """$NEREID_CACHE, else $XDG_CACHE_HOME/nereid, else ~/.cache/nereid. Absolute; it may not exist yet."""
    if own := os.environ.get("NEREID_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "nereid"


def build_once(target: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    """`target`, made by `build(an empty folder)` unless it is there already.

    Raises what `build` raises, after removing what it left, and OSError where the folder cannot be written.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock", progress):
        if not target.is_dir():
            _build_and_rename(target, build)
    return target


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed: we hold the lock
    partial.mkdir()
    try:
        build(partial)
        partial.rename(target)
    except OSError as error:
        if error.filename is None:  # a full disk shows itself in a write, which does not know its file
            error.filename = str(target.parent)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it however this process ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {path.name[1:-5]}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
