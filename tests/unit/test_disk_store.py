"""Blocks on disk: what is stored comes back exactly, or not at all; whatever becomes of the files."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nereid.errors import ConfigError
from nereid.kv_memory.disk_format import BlockFormat
from nereid.kv_memory.disk_store import DiskStore
from tests.unit.disk_blocks import (
    FINGERPRINT,
    PAGE_BYTES,
    filled_with,
    loaded,
    make_key,
    make_page,
    open_store,
    put,
    store,
)

FILE_BYTES = BlockFormat(FINGERPRINT, PAGE_BYTES).file_bytes(make_key(100))


def path_of(directory: Path, number: int) -> Path:
    name = make_key(number).name
    return directory / name[:2] / f"{name}.kv"


def as_it_is(page: bytearray) -> None:
    """Whatever was in it."""


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    first = open_store(tmp_path / "cache")
    put(first, 1, 2)
    first.close(30)
    second = open_store(tmp_path / "cache")
    assert second.names() == {make_key(1).name, make_key(2).name}
    assert loaded(second, 1) == make_page(1) and loaded(second, 2) == make_page(2) and loaded(second, 3) is None
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files_in(tmp_path)}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_a_block_that_still_waits_is_loaded(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1 << 30, FINGERPRINT, 16 << 20)
    disk.store(make_key(1), filled_with(b"a" * (16 << 20)))
    disk.store(make_key(2), filled_with(b"b" * (16 << 20)))
    assert disk.load(make_key(2)) == bytearray(b"b") * (16 << 20)
    assert disk.flush(30)
    assert disk.load(make_key(1)) == bytearray(b"a") * (16 << 20)


def test_pages_are_used_again_and_never_mixed_up(tmp_path: Path) -> None:
    """Loads and stores come as fast as they can, in a queue that holds a few."""
    disk = DiskStore(tmp_path, 1 << 30, FINGERPRINT, PAGE_BYTES, queue_bytes=4 * PAGE_BYTES)
    chance = random.Random(0)
    unseen = set(range(100))
    for _ in range(1_000_000):
        number = chance.randrange(100)
        if (found := loaded(disk, number)) is None:
            store(disk, number)
        else:
            assert found == make_page(number)
            unseen.discard(number)
        if not unseen:
            break
    assert not unseen and disk.flush(30) and len(disk.names()) == 100


def test_what_is_there_is_not_copied_again(tmp_path: Path) -> None:
    disk = open_store(tmp_path)
    put(disk, 1)
    os.utime(path_of(tmp_path, 1), (1, 1))
    assert disk.store(make_key(1), lambda page: pytest.fail("was copied"))
    assert path_of(tmp_path, 1).stat().st_mtime > 1e9


def test_a_full_queue_drops_blocks_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = 64 << 20  # takes much longer to write than to offer the next ones
    disk = DiskStore(tmp_path, 1 << 40, FINGERPRINT, size, queue_bytes=1)
    assert disk.store(make_key(1), as_it_is)
    for number in range(2, 100):
        assert not disk.store(make_key(number), lambda page: pytest.fail("was copied"))
    assert disk.flush(60)
    assert disk.names() == {make_key(1).name}
    assert [m for m in caplog.messages if "not kept" in m] == ["a block is not kept on disk: 1 wait to be written"]
    assert disk.store(make_key(2), as_it_is) and disk.flush(60)
    assert len(disk.names()) == 2


def test_closing_waits_for_the_deadline_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = 64 << 20
    disk = DiskStore(tmp_path, 1 << 40, FINGERPRINT, size, queue_bytes=8 * size)
    for number in range(4):
        disk.store(make_key(number), as_it_is)
    assert not disk.flush(0.0)
    disk.close(0.0)
    assert "blocks were not written to disk: 0.0 s were over" in caplog.text
    assert not disk.store(make_key(9), lambda page: pytest.fail("was copied"))
    disk.close(60)
    assert len(disk.names()) == 4


def damage_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


HEADER_END = FILE_BYTES - PAGE_BYTES - 4
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"cut to {n}": partial(os.truncate, length=n) for n in
       (0, 5, 8, 11, 15, 16, 40, HEADER_END, HEADER_END + 1, HEADER_END + 500, FILE_BYTES - 4, FILE_BYTES - 1)},
    **{f"bit in byte {n}": partial(damage_bit, offset=n) for n in
       (0, 8, 12, 20, HEADER_END - 1, HEADER_END, HEADER_END + 999, FILE_BYTES - 4, FILE_BYTES - 1)},
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "another file": lambda path: path.write_bytes(b"\x7fELF" + bytes(5000)),
    "zeros": lambda path: path.write_bytes(bytes(FILE_BYTES)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_removed_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_store(tmp_path)
    put(disk, 100)
    path = path_of(tmp_path, 100)
    DAMAGES[damage](path)
    assert loaded(disk, 100) is None
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{path} is not used, and removed: it")
    assert not path.exists()
    put(disk, 100)
    assert loaded(disk, 100) == make_page(100)


def test_a_renamed_file_is_removed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = open_store(tmp_path)
    put(disk, 1)
    path_of(tmp_path, 2).parent.mkdir(exist_ok=True)
    path_of(tmp_path, 1).rename(path_of(tmp_path, 2))
    assert loaded(disk, 1) is None and not caplog.messages  # it is just not there
    assert loaded(disk, 2) is None
    assert "removed: it holds a block of another name, so the file was renamed" in caplog.text


def test_a_file_of_another_model_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(open_store(tmp_path), 1)
    assert DiskStore(tmp_path, 1 << 30, "e" * 64, PAGE_BYTES).load(make_key(1)) is None
    assert "it holds a block of another model, dtype or layout" in caplog.text


def test_salts_never_meet(tmp_path: Path) -> None:
    disk = open_store(tmp_path)
    key, other = make_key(1, salt="org_1"), make_key(1, salt="org_2")
    disk.store(key, filled_with(make_page(1)))
    assert disk.flush(30)
    found = disk.load(key)
    assert found is not None and bytes(found) == make_page(1)
    assert disk.load(other) is None and loaded(disk, 1) is None
    everything = b"".join(str(path).encode() + path.read_bytes() for path in files_in(tmp_path))
    assert b"org" not in everything and b"org".hex().encode() not in everything


def test_a_thousand_damaged_files_are_a_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = open_store(tmp_path)
    put(disk, *range(200))
    for path in files_in(tmp_path):
        os.truncate(path, 100)
    assert not any(loaded(disk, number) for number in range(200))
    assert len(caplog.messages) == 5 and not files_in(tmp_path)


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["notes.txt", "ab/notes.txt", f"mine/{'a' * 64}.kv", f"ab/{'a' * 64}.kv/x", f"cd/.{'a' * 64}.partial", "ef"]
    foreign = [tmp_path / name for name in names]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    disk = open_store(tmp_path, max_bytes=20_000)
    assert len(caplog.messages) == 1 and "6 entries there are not Nereid's" in caplog.messages[0]
    put(disk, *range(100))
    assert all(path.read_text() == "mine" for path in foreign)
    assert len(caplog.messages) == 1 and "aaaa" not in disk.names()


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    disk = open_store(tmp_path, max_bytes=16 * FILE_BYTES)
    put(disk, *range(10, 26))
    assert len(disk.names()) == 16
    assert loaded(disk, 10) and store(disk, 11)  # both count as use
    put(disk, 26)
    assert make_key(10).name in disk.names() and make_key(11).name in disk.names()
    left = [number for number in range(10, 27) if make_key(number).name in disk.names()]
    assert left == [10, 11, *range(27 - len(left) + 2, 27)] and 13 <= len(left) <= 16
    for number in range(27, 100):
        put(disk, number)
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 16 * FILE_BYTES


def test_a_full_directory_stays_as_it_is_at_a_start(tmp_path: Path) -> None:
    disk = open_store(tmp_path, max_bytes=16 * FILE_BYTES)
    put(disk, *range(10, 26))
    assert open_store(tmp_path, max_bytes=16 * FILE_BYTES).names() == disk.names()
    put(open_store(tmp_path, max_bytes=10 * FILE_BYTES), 30)  # a smaller bound holds from the first block on
    assert len(files_in(tmp_path)) <= 10


def test_a_directory_that_is_taken_away_costs_its_blocks_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    disk = open_store(directory)
    put(disk, 1)
    directory.rename(tmp_path / "elsewhere")
    assert loaded(disk, 1) is None
    assert store(disk, 2) and disk.flush(30)
    assert "cannot be written: No such file or directory" in caplog.text
    assert not store(disk, 3)  # not tried again at once


@pytest.mark.parametrize("kind", ["missing", "file", "pipe", "system"])
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, kind: str) -> None:
    path = {"missing": tmp_path / "a" / "b", "system": Path("/proc/self")}.get(kind, tmp_path / "thing")
    if kind == "file":
        path.write_text("")
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"disk_cache_dir: got '{path}' .*; allowed: a directory that can be written"):
        open_store(path)


def test_a_bound_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_cache_bytes: got 1000; allowed: at least 9192, which one block takes"):
        open_store(tmp_path, max_bytes=1000)


def test_a_bound_above_the_disk_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path, max_bytes=1 << 50)
    assert "disk_cache_bytes: got 1125899906842624, but" in caplog.text
