"""The bounds that Linux control groups set to this process's memory: of version 1 and 2, its own group's and those of
every group above it that can be seen.

Pure reading of /proc and of the mounted group tree; what is missing there sets no bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """limit: bytes that the group's processes may hold.  used: bytes that they hold, but for cached files that the
    kernel drops at need."""

    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of files and of a line of memory.stat. limits: beyond either of them processes are stopped or slowed."""

    limits: tuple[str, ...]
    usage: str
    droppable: str


@dataclass(frozen=True, slots=True)
class _Mount:
    """root: which group of the whole tree is seen at `folder`."""

    version: _Version
    root: str
    folder: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def memory_groups(root: Path = Path("/")) -> tuple[GroupMemory, ...]:
    """Every group that bounds this process. root: where the file system begins."""
    paths = dict(_own_groups(_text(root / "proc/self/cgroup")))
    return tuple(
        found
        for mount in _mounts(_text(root / "proc/self/mountinfo"))
        if mount.version in paths
        for folder in _upwards(root / mount.folder.lstrip("/"), _below(paths[mount.version], mount.root))
        if (found := _read(folder, mount.version))
    )


def _own_groups(text: str) -> Iterator[tuple[_Version, str]]:
    """The process's group by version. A line is `number:controllers:path`; version 2 has number 0 and no names."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mounts(text: str) -> Iterator[_Mount]:
    """A line is `id parent device root folder options [tags] - type source options`."""
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        mount_root, folder = (part.replace("\\040", " ") for part in place.split()[3:5])
        file_system, *_, options = kind.split()
        if file_system == "cgroup2":
            yield _Mount(_V2, mount_root, folder)
        elif file_system == "cgroup" and "memory" in options.split(","):
            yield _Mount(_V1, mount_root, folder)


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Where a group lies under a mount. One that is not under it is the one mounted: a container sees its own so."""
    try:
        below = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in below.parts else below


def _upwards(mount: Path, below: PurePosixPath) -> Iterator[Path]:
    """The folder of a group and of those above it."""
    for part in (below, *below.parents):
        yield mount / part


def _read(folder: Path, version: _Version) -> GroupMemory | None:
    limits = [limit for name in version.limits if (limit := _number(_text(folder / name))) is not None]
    if not limits:
        return None
    droppable = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
    used = (_number(_text(folder / version.usage)) or 0) - int(droppable.get(version.droppable, 0))
    return GroupMemory(min(limits), max(0, used))


def _number(text: str) -> int | None:
    """None for `max`, and where there is none."""
    return int(text) if text.strip().isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
