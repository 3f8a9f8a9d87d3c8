"""DiskStore: blocks on disk, which outlive the process. Owns the thread that writes, and what waits to be written.

Always holds: `load` gives exactly the bytes that `store` took for the same key, or nothing; nobody waits for a write;
what goes wrong on the disk costs a warning and that block. Loads and stores come from one thread.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nereid.batch import BlockKey
from nereid.errors import ConfigError
from nereid.kv_memory.disk_folder import DiskFolder, stored_names
from nereid.kv_memory.disk_format import BlockFormat
from nereid.kv_memory.limited_log import LimitedLog

_LOG = logging.getLogger(__name__)
_QUEUE_BYTES = 64 << 20  # of pages that wait to be written; at least one may
_PAUSE_S = 10.0  # without writes, after one that failed
_HEADER_ROOM = 8192  # more than a file has beside its page


class DiskStore:
    """Blocks of `page_bytes` bytes in files of a directory, of at most `max_bytes` together with whatever else of
    Nereid's is there: other models' blocks may be, and other processes may use it at the same time."""

    def __init__(
        self, directory: Path, max_bytes: int, fingerprint: str, page_bytes: int, *, queue_bytes: int = _QUEUE_BYTES
    ) -> None:
        """The directory is made where only its last part is missing.  fingerprint: as in Capacity.

        Raises ConfigError, which names disk_cache_dir or disk_cache_bytes.
        """
        self._directory = directory
        self._format = BlockFormat(fingerprint, page_bytes)
        self._folder = _open_folder(directory, max_bytes, page_bytes + _HEADER_ROOM)
        self._max_waiting = max(1, queue_bytes // page_bytes)
        self._refused, self._failed, self._dropped = LimitedLog(_LOG), LimitedLog(_LOG), LimitedLog(_LOG, burst=1)
        self._staging = bytearray()
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[BlockKey, bytearray, int]] = {}  # by name, the earliest first
        self._spare: list[bytearray] = []  # pages to use again: memory that the system has to find first is slow
        self._closed = False
        self._paused_until = 0.0
        self._writer = threading.Thread(target=self._write_waiting, name="nereid-disk", daemon=True)
        self._writer.start()

    def names(self) -> frozenset[str]:
        """Names of the blocks that are there now, whichever model's; none is looked into."""
        return stored_names(self._directory)

    def store(self, key: BlockKey, copy_to: Callable[[bytearray], None], wait_s: float = 0.0) -> bool:
        """Have a block written, if it is not there yet. False where it is given up: the disk is too slow, or fails.

        copy_to: copies the block's bytes into a page; called before this returns, or not at all.  wait_s: for so many
        seconds where too many blocks wait to be written.
        """
        now = time.time_ns()
        with self._changed:
            if self._closed or time.monotonic() < self._paused_until:
                return False
            if key.name in self._waiting or self._folder.touch(key.name, now):
                return True
            if not self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting, wait_s):
                self._dropped.warning("a block is not kept on disk: %d wait to be written", len(self._waiting))
                return False
            page = self._spare.pop() if self._spare else bytearray(self._format.page_bytes)
            copy_to(page)
            self._waiting[key.name] = key, page, now
            self._changed.notify_all()
            return True

    def load(self, key: BlockKey, used_ns: int | None = None) -> memoryview | bytearray | None:
        """The block's page, good until the next load or store; None where it is not there, or is not right.

        used_ns: its last use from now on, in ns since 1970; None is now.
        """
        with self._changed:
            waiting = self._waiting.get(key.name)
        if waiting is not None:
            return waiting[1] if waiting[0] == key else None
        try:
            data = self._read(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refused.warning("%s is not used: %s", self._folder.path(key.name), error.strerror)
            return None
        if fault := self._format.fault(data, key):
            self._refused.warning("%s is not used, and removed: %s", self._folder.path(key.name), fault)
            self._folder.remove(key.name)
            return None
        self._folder.touch(key.name, time.time_ns() if used_ns is None else used_ns)
        return self._format.page(data)

    def _read(self, key: BlockKey) -> memoryview:
        """The file's bytes; of one that is too long, not all."""
        with open(self._folder.path(key.name), "rb", buffering=0) as file:
            wanted = min(os.fstat(file.fileno()).st_size, self._format.file_bytes(key) + 1)
            if len(self._staging) < wanted:
                self._staging = bytearray(wanted + _HEADER_ROOM)
            whole, size = memoryview(self._staging)[:wanted], 0
            while size < wanted and (count := file.readinto(whole[size:])):
                size += count
        return whole[:size]

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is written. False where `deadline_s` seconds were too few."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, deadline_s)

    def close(self, deadline_s: float) -> None:
        """Write what waits, for at most `deadline_s` seconds; store nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join(deadline_s)
        if left := len(self._waiting):
            _LOG.warning("%d blocks were not written to disk: %.1f s were over", left, deadline_s)

    def _write_waiting(self) -> None:
        """The writing thread."""
        while (item := self._next()) is not None:
            key, page, used_ns = item
            try:
                self._folder.write(key.name, self._format.parts(key, page), used_ns)
            except OSError as error:
                self._paused_until = time.monotonic() + _PAUSE_S
                reason = error.strerror or error
                self._failed.warning("%s cannot be written: %s", self._folder.path(key.name), reason)
            with self._changed:
                del self._waiting[key.name]
                self._spare.append(page)
                self._changed.notify_all()

    def _next(self) -> tuple[BlockKey, bytearray, int] | None:
        """The earliest that waits, which goes on waiting meanwhile; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return next(iter(self._waiting.values()), None)


def _open_folder(directory: Path, max_bytes: int, file_bytes: int) -> DiskFolder:
    if max_bytes < file_bytes:
        raise ConfigError(f"disk_cache_bytes: got {max_bytes}; allowed: at least {file_bytes}, which one block takes")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        folder = DiskFolder(directory, max_bytes)
        folder.try_out(file_bytes)
    except OSError as error:
        allowed = "a directory that can be written, with room in it, or the name of one to be made in a directory"
        raise ConfigError(f"disk_cache_dir: got {str(directory)!r} ({error.strerror}); allowed: {allowed}") from error
    if (room := shutil.disk_usage(directory).free + folder.total_bytes) < max_bytes:
        _LOG.warning(
            "disk_cache_bytes: got %d, but %s has room for %d: fewer blocks are kept", max_bytes, directory, room
        )
    return folder
