"""Blocks to store on disk: key and page are functions of a number, so that every process knows what each must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from nereid.batch import BlockKey
from nereid.kv_cache.block_keys import child_name, root_name
from nereid.kv_memory.disk_store import DiskStore

FINGERPRINT = "f" * 64
PAGE_BYTES = 1000


def make_key(number: int, fingerprint: str = FINGERPRINT, salt: str | None = None) -> BlockKey:
    parent = child_name(root_name(fingerprint, salt, None), (number,) * 4, 0)
    token_ids = (number, number + 1, number + 2, number + 3)
    return BlockKey(child_name(parent, token_ids, 0), parent, token_ids, 0)


def make_page(number: int, size: int = PAGE_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def open_store(directory: Path, max_bytes: int = 1 << 30, page_bytes: int = PAGE_BYTES) -> DiskStore:
    return DiskStore(directory, max_bytes, FINGERPRINT, page_bytes)


def store(disk: DiskStore, number: int, size: int = PAGE_BYTES) -> bool:
    return disk.store(make_key(number), filled_with(make_page(number, size)))


def filled_with(data: bytes) -> Callable[[bytearray], None]:
    """What copies a block's bytes, which are `data`."""

    def copy_to(page: bytearray) -> None:
        page[:] = data

    return copy_to


def put(disk: DiskStore, *numbers: int) -> None:
    """Store blocks, one after the other, each written before the next."""
    for number in numbers:
        assert store(disk, number)
        assert disk.flush(30)


def loaded(disk: DiskStore, number: int) -> bytes | None:
    data = disk.load(make_key(number))
    return None if data is None else bytes(data)
