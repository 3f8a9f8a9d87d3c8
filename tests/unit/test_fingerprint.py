"""The fingerprint changes with every byte and every fact, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereid.kv_memory import fingerprint as module
from nereid.kv_memory.fingerprint import fingerprint

FACTS = ("bfloat16", "16 tokens")


def write(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]


def test_place_and_order_of_the_files_do_not_count(tmp_path: Path) -> None:
    one = write(tmp_path / "one", config=b"{}", weights=b"abc")
    other = write(tmp_path / "other", weights=b"abc", config=b"{}")
    assert fingerprint(one, FACTS) == fingerprint(other, FACTS)
    assert len(fingerprint(one, FACTS)) == 64


def test_every_fact_counts(tmp_path: Path) -> None:
    files = write(tmp_path / "model", config=b"{}")
    cases = [FACTS, FACTS[:1], FACTS[1:], FACTS[::-1], ("bfloat161", "6 tokens"), (), ("",), ("", "")]
    assert len({fingerprint(files, facts) for facts in cases}) == len(cases)


def test_names_and_cuts_of_files_count(tmp_path: Path) -> None:
    cases = [
        {"a": b"xy", "b": b"z"}, {"a": b"x", "b": b"yz"}, {"a": b"xyz", "b": b""}, {"a": b"xyz"}, {"b": b"xyz"},
        {"ab": b"xyz"}, {"a": b"xyz\0"}, {"a": b"z", "b": b"xy"},
    ]  # fmt: skip
    prints = {fingerprint(write(tmp_path / str(index), **case), FACTS) for index, case in enumerate(cases)}
    assert len(prints) == len(cases)


def test_every_byte_counts_also_in_later_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 16)
    data = bytearray(range(70))
    prints = set()
    for offset in range(len(data)):
        data[offset] ^= 1
        prints.add(fingerprint(write(tmp_path / str(offset), weights=bytes(data)), FACTS))
        data[offset] ^= 1
    assert len(prints) == len(data)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        fingerprint([tmp_path / "nowhere"], FACTS)
