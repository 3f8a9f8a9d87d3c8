"""BlockFormat: what the file of a stored block holds. Bytes in, bytes out; opens nothing.

    magic, format version, length of the header | header: JSON of all that the page depends on | page | CRC-32 of these

Always holds: `fault` is None only for a file that was written for the very same key under the same fingerprint, of full
length and with the right checksum. Salt and adapter are in it only by the digest that is the block's name.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass

from nereid.batch import BlockKey

MAGIC = b"NEREIDKV"
VERSION = 1
_START = struct.Struct("<8sII")  # magic, format version, bytes of the header
_CHECKSUM = struct.Struct("<I")
_MEANINGS = {
    "fingerprint": "of another model, dtype or layout",
    "page_bytes": "of another size",
    "name": "of another name, so the file was renamed",
    "parent": "behind another one",
    "token_ids": "of other tokens",
    "group": "of another KV cache group",
}

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Files of blocks of `page_bytes` bytes that were computed under `fingerprint`."""

    fingerprint: str
    page_bytes: int

    def file_bytes(self, key: BlockKey) -> int:
        """Size of the block's file."""
        return len(self._head(key)) + self.page_bytes + _CHECKSUM.size

    def parts(self, key: BlockKey, page: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        """The block's file: what is to be written, in this order."""
        head = self._head(key)
        return head, page, _CHECKSUM.pack(zlib.crc32(page, zlib.crc32(head)))

    def fault(self, data: memoryview, key: BlockKey) -> str | None:
        """Why a file's bytes are not this block's, in words; None where they are."""
        if not data:
            return "it is empty"
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            return "it is no file of Nereid's, or its beginning is damaged"
        if len(data) < _START.size:
            return f"it was cut off after {len(data)} bytes"
        _, version, length = _START.unpack_from(data)
        if version != VERSION:
            return f"its format version is {version}, not {VERSION}"
        body = data[: -_CHECKSUM.size]
        if _CHECKSUM.pack(zlib.crc32(body)) != data[-_CHECKSUM.size :]:
            return f"its checksum is wrong: it is damaged, or not all of its {self.file_bytes(key)} bytes are there"
        return (
            None if body[: -self.page_bytes] == self._head(key) else self._difference(body[_START.size :][:length], key)
        )

    def page(self, data: memoryview) -> memoryview:
        """The page in the bytes of a file without a fault."""
        return data[-_CHECKSUM.size - self.page_bytes : -_CHECKSUM.size]

    def _head(self, key: BlockKey) -> bytes:
        header = json.dumps(self._fields(key), separators=(",", ":")).encode()
        return _START.pack(MAGIC, VERSION, len(header)) + header

    def _fields(self, key: BlockKey) -> dict[str, object]:
        return {
            "fingerprint": self.fingerprint,
            "page_bytes": self.page_bytes,
            "name": key.name,
            "parent": key.parent,
            "token_ids": list(key.token_ids),
            "group": key.group,
        }

    def _difference(self, header: memoryview, key: BlockKey) -> str:
        """What a whole file says of itself that is not so of the block."""
        try:
            found = json.loads(bytes(header))
            return next(
                f"it holds a block {_MEANINGS[name]}" for name, own in self._fields(key).items() if found[name] != own
            )
        except (ValueError, KeyError, TypeError, StopIteration):
            return "its header is not as this version writes it"
