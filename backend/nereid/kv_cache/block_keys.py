"""Names of blocks: a digest of everything that a block's contents depend on, equal in every process that would compute
the same ones.

Always holds: two blocks share a name only where fingerprint, salt, adapter, all tokens up to the block's last, group
and cutting into blocks are equal (a digest of 256 bits is taken for what it is a digest of). Everything is written with
its type and length before it is digested, so that no two lists of parts read alike.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_DIGEST_BYTES = 32
_ROOT, _CHILD = b"nereid kv root", b"nereid kv block"  # what is named: roots and blocks never meet
_ABSENT, _TEXT = 0, 1
NAME_LENGTH = 2 * _DIGEST_BYTES
"""Characters of a name, each one of 0-9 and a-f."""


def root_name(fingerprint: str, salt: str | None, adapter: str | None) -> str:
    """The name before a sequence's first block.

    fingerprint: as in Capacity.  salt, adapter: None and "" differ. Neither can be read from the name.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=_ROOT)
    for part in (fingerprint, salt, adapter):
        digest.update(_described(part))
    return digest.hexdigest()


def child_name(parent: str, token_ids: Sequence[int], group: int) -> str:
    """The name of the block of KV cache group `group` that holds `token_ids` behind what `parent` names.

    Raises ValueError where `parent` is no name.
    """
    before = bytes.fromhex(parent)
    if len(before) != _DIGEST_BYTES:
        raise ValueError(f"parent: got {parent[: NAME_LENGTH + 1]!r}; allowed: a name of {NAME_LENGTH} characters")
    own = struct.pack(f"<2q{len(token_ids)}q", group, len(token_ids), *token_ids)
    return hashlib.blake2b(before + own, digest_size=_DIGEST_BYTES, person=_CHILD).hexdigest()


def _described(part: str | None) -> bytes:
    """A part with its type and length. Any text will do, lone surrogates too."""
    if part is None:
        return struct.pack("<Bq", _ABSENT, 0)
    data = part.encode("utf-8", "surrogatepass")
    return struct.pack("<Bq", _TEXT, len(data)) + data
