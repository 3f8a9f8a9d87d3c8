"""DiskFolder: a directory of stored blocks: which files are there, how they come and go; not what is in them.

A block is what may be lost at any time: of the KV cache, or a model's packed weights, which have an ending of their
own. Its file is `AB/ABCD....kv`, by its name; everything else is foreign and left alone. Always holds: a file appears
whole, by renaming; what a killed process was writing bears another name, and is removed by the next that starts. Any
number of processes may share a directory: a file may be gone at any time, which is no error.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nereid.kv_memory.disk_format import Bytes

ENDING = ".kv"
_LOG = logging.getLogger(__name__)
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{16,128}")
_PARTIAL = re.compile(r"\.[0-9a-f]{16,128}\.[0-9a-f]{16}\.partial")
_OF_THE_SYSTEM = {"lost+found"}
_TRIAL = "0" * 64
_FULL = {errno.ENOSPC, errno.EDQUOT}
_ROOM = 8  # making room leaves 1/8 of the bound free, so that it is rarely made
_LOOK = 64  # other processes' files are counted anew after each 1/64 of the bound that this one wrote


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A block's file. used_ns: its last use, in ns since 1970."""

    name: str
    size: int
    used_ns: int


@dataclass(slots=True)
class Contents:
    """What lies in a directory. partial: unfinished files, of whatever process."""

    blocks: list[StoredFile] = field(default_factory=list)
    partial: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(block.size for block in self.blocks)


class DiskFolder:
    """Files of at most `max_bytes` together. `write` belongs to one thread; the rest may be called by any."""

    def __init__(self, directory: Path, max_bytes: int, ending: str = ENDING) -> None:
        """The directory must exist.  ending: of files' names. Raises OSError where it cannot be read."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._ending = ending
        contents = contents_of(directory, ending)
        for path in contents.partial:
            _remove_abandoned(path)
        if contents.foreign:
            _LOG.warning(
                "%s: %d entries there are not Nereid's and are left alone, such as %s",
                directory, len(contents.foreign), contents.foreign[0].name,
            )  # fmt: skip
        self._total = contents.total_bytes
        self._unseen = 0  # bytes written since all files were counted

    def path(self, name: str) -> Path:
        """Where the block of this name lies, if it does. Raises ValueError where `name` is no name of a block."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: got {name[:130]!r}; allowed: 16 to 128 characters of 0-9 and a-f")
        return self._directory / name[:2] / (name + self._ending)

    def touch(self, name: str, used_ns: int) -> bool:
        """Note that a block is used. False where there is none."""
        try:
            os.utime(self.path(name), ns=(used_ns, used_ns))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # another user's, or a disk that can only be read: the file is there all the same
            return True
        return True

    def remove(self, name: str) -> bool:
        """Whether the block's file is gone now."""
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError:
            return False
        return True

    @property
    def total_bytes(self) -> int:
        """Of all blocks' files, when they were last counted, and those written since."""
        return self._total

    def write(self, name: str, parts: Sequence[Bytes], used_ns: int) -> None:
        """Make the block's file, and room for it. Raises OSError; nothing is left then."""
        size = sum(map(len, parts))
        self._make_room(size)
        self._on_a_full_disk_too(size, lambda: self._put(name, parts, used_ns))
        self._total += size
        self._unseen += size

    def try_out(self, size: int) -> None:
        """Raise OSError unless a file of `size` bytes can be written."""
        self._on_a_full_disk_too(size, lambda: self._put(_TRIAL, (bytes(size),), 0, keep=False))

    def _on_a_full_disk_too(self, size: int, put: Callable[[], None]) -> None:
        """Once more with fewer blocks, where `size` bytes were too many."""
        try:
            put()
        except OSError as error:
            if error.errno not in _FULL or not self._give_way(size):
                raise
            put()

    def _put(self, name: str, parts: Sequence[Bytes], used_ns: int, *, keep: bool = True) -> None:
        target = self.path(name)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        partial = target.with_name(f".{name}.{secrets.token_hex(8)}.partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                with suppress(OSError):  # some network's disks have no locks: their unfinished files then stay
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the system however this process ends
                file.writelines(parts)
                file.flush()
                os.utime(file.fileno(), ns=(used_ns, used_ns))
                if keep:
                    partial.rename(target)
        finally:
            with suppress(OSError):  # most often it has its name by now
                partial.unlink()

    def _make_room(self, size: int) -> None:
        """Remove what was not used for longest, unless `size` bytes fit. Raises OSError where they still do not."""
        if self._total + size <= self._max_bytes and self._unseen < self._max_bytes // _LOOK:
            return
        blocks = self._count()
        if self._total + size > self._max_bytes:
            self._shrink(blocks, self._max_bytes - self._max_bytes // _ROOM - size)
        if self._total + size > self._max_bytes:
            raise OSError(errno.EDQUOT, "no room, and the blocks there cannot be removed")

    def _give_way(self, size: int) -> bool:
        """The disk is full though the bound is not: remove what was not used for longest. False where there is none."""
        blocks = self._count()
        self._shrink(blocks, min(self._total - size, self._total - self._total // _ROOM))
        return bool(blocks)

    def _count(self) -> list[StoredFile]:
        contents = contents_of(self._directory, self._ending)
        self._total, self._unseen = contents.total_bytes, 0
        return contents.blocks

    def _shrink(self, blocks: Iterable[StoredFile], wanted: int) -> None:
        """Remove files until at most `wanted` bytes are left, the longest unused first."""
        for block in sorted(blocks, key=lambda block: block.used_ns):
            if self._total <= wanted:
                return
            if self.remove(block.name):
                self._total -= block.size


def contents_of(directory: Path, ending: str = ENDING) -> Contents:
    """Look through a directory. Raises OSError where it cannot be read."""
    found = Contents()
    with os.scandir(directory) as entries:
        for entry in entries:
            if _SUBFOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _look_into(entry.path, ending, found)
            elif entry.name not in _OF_THE_SYSTEM:
                found.foreign.append(Path(entry.path))
    return found


def stored_names(directory: Path) -> frozenset[str]:
    """Names of the blocks that are there now, whichever model's; none is looked into. Raises OSError likewise."""
    return frozenset(block.name for block in contents_of(directory).blocks)


def _look_into(folder: str, ending: str, found: Contents) -> None:
    for entry in _entries(folder):
        name = entry.name.removesuffix(ending)
        if name != entry.name and _NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.blocks.append(StoredFile(name, status.st_size, status.st_mtime_ns))
        elif _PARTIAL.fullmatch(entry.name):
            found.partial.append(Path(entry.path))
        else:
            found.foreign.append(Path(entry.path))


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def _remove_abandoned(path: Path) -> None:
    """Remove an unfinished file unless somebody is writing it."""
    with suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
