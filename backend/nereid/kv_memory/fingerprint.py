"""fingerprint: of all that stored bytes depend on: a block's, beside its tokens, or packed weights'. Pure: of files and
texts; knows no tensor.

Every byte of the model's files is read, so that a change anywhere in them is noticed. What is not: a changed way of
computing from the same facts, for which REVISION is there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REVISION = 2
"""Raise it when Nereid computes other KV from the same model, or lays it out otherwise: stored blocks are then void."""

_CHUNK = 8 << 20  # bytes that one thread digests at a time
_MAX_THREADS = 16


def fingerprint(files: Iterable[Path], facts: Sequence[str]) -> str:
    """64 characters, equal where all files have the same names and bytes and all facts are the same texts.

    files: the model's configuration and weights; their folder does not count.  facts: dtypes, layout and what computes.
    Takes as long as the disk, or as SHA-256 of all bytes on as many threads as there are processors. Raises OSError.
    """
    whole = hashlib.sha256()
    parts = [f"nereid kv {REVISION}".encode()]
    for path in sorted(files, key=lambda path: path.name):
        parts += [os.fsencode(path.name), path.stat().st_size.to_bytes(8, "little"), *_digests(path)]
    for part in [*parts, b"facts", *(fact.encode() for fact in facts)]:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def _digests(path: Path) -> list[bytes]:
    """One for each chunk of a file."""
    with path.open("rb") as file, ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        starts = range(0, os.fstat(file.fileno()).st_size, _CHUNK)
        # Read, not mapped: a file that is cut short meanwhile would end the process.
        return list(threads.map(lambda start: hashlib.sha256(os.pread(file.fileno(), _CHUNK, start)).digest(), starts))
