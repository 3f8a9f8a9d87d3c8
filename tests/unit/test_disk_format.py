"""A block's file is accepted whole and for its own key, or not at all."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib

import pytest

from nereid.batch import BlockKey
from nereid.kv_memory.disk_format import BlockFormat
from tests.unit.disk_blocks import FINGERPRINT, make_key, make_page

PAGE_BYTES = 40
FORMAT = BlockFormat(FINGERPRINT, PAGE_BYTES)
KEY, PAGE = make_key(7), make_page(7, PAGE_BYTES)


def file_of(page: bytes = PAGE, form: BlockFormat = FORMAT, key: BlockKey = KEY) -> bytes:
    return b"".join(form.parts(key, page))


def fault(data: bytes | bytearray, key: BlockKey = KEY) -> str | None:
    return FORMAT.fault(memoryview(data), key)


def with_right_checksum(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def test_what_was_written_is_read() -> None:
    data = file_of()
    assert fault(data) is None
    assert FORMAT.page(memoryview(data)) == PAGE
    assert FORMAT.file_bytes(KEY) == len(data)


def test_every_cut_is_noticed() -> None:
    data = file_of()
    assert all(fault(data[:length]) for length in range(len(data)))
    assert fault(data + b"\0") and fault(data + data) and fault(bytes(len(data)))


def test_every_flipped_bit_is_noticed() -> None:
    data = bytearray(file_of())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert fault(data), f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8
    assert fault(data) is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b"NERE", "it was cut off after 4 bytes"),
        (b"NEREIDKV\1\0\0\0", "it was cut off after 12 bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(500), "it is no file of Nereid's, or its beginning is damaged"),
        (b"x", "it is no file of Nereid's, or its beginning is damaged"),
        (with_right_checksum(b"NEREIDKV\2\0\0\0" + file_of()[12:]), "its format version is 2, not 1"),
        (file_of()[:-1], "its checksum is wrong: it is damaged, or not all of its 341 bytes are there"),
        (with_right_checksum(file_of()[:16] + bytes(40)), "its header is not as this version writes it"),
        (with_right_checksum(file_of()[:16] + b"{}" + bytes(40)), "its header is not as this version writes it"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, words: str) -> None:
    assert fault(data) == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "0" * 64}, "of another name, so the file was renamed"),
        ({"parent": "0" * 64}, "behind another one"),
        ({"token_ids": (7, 8, 9, 11)}, "of other tokens"),
        ({"token_ids": (7, 8, 9)}, "of other tokens"),
        ({"group": 1}, "of another KV cache group"),
    ],
)
def test_a_block_of_another_key_is_not_used(change: dict[str, object], words: str) -> None:
    other = dataclasses.replace(KEY, **change)  # type: ignore[arg-type]
    assert fault(file_of(key=other)) == f"it holds a block {words}"


def test_a_block_of_another_model_is_not_used() -> None:
    assert (
        fault(file_of(form=BlockFormat("e" * 64, PAGE_BYTES))) == "it holds a block of another model, dtype or layout"
    )
    assert fault(file_of(bytes(41), BlockFormat(FINGERPRINT, 41))) == "it holds a block of another size"


def test_a_file_names_no_salt() -> None:
    """What a file says of itself: digests, tokens and sizes."""
    salted = make_key(7, salt="tenant-a")
    data = file_of(key=salted)
    assert b"tenant" not in data and b"tenant-a".hex().encode() not in data
    length = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[16 : 16 + length])
    assert header == {
        **dataclasses.asdict(salted),
        "token_ids": [7, 8, 9, 10],
        "fingerprint": FINGERPRINT,
        "page_bytes": 40,
    }
    assert salted.name != KEY.name and salted.parent != KEY.parent
