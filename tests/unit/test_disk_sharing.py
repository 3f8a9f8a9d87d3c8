"""The disk store beside other processes: killed in the middle of a write, sharing a directory; and on a full disk."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nereid.kv_memory.disk_store import DiskStore
from tests.unit.disk_blocks import FINGERPRINT, loaded, make_key, make_page, open_store, put

ROOT = Path(__file__).resolve().parents[2]
LARGE = 64 << 20  # a page that takes long enough to write to be caught at it
PREAMBLE = """
import logging, os, random, sys
from pathlib import Path
from nereid.errors import ConfigError
from nereid.kv_memory.disk_store import DiskStore
from tests.unit.disk_blocks import *
logging.basicConfig(format="%(message)s")
directory = Path(sys.argv[1])
"""


def start(script: str, directory: Path, *arguments: object, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*wrapper, sys.executable, "-c", PREAMBLE + script, str(directory), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed, and what it logged."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output, errors


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def unfinished(directory: Path) -> list[Path]:
    return list(directory.glob("*/.*.partial"))


def test_a_process_that_is_killed_leaves_whole_files_or_none(tmp_path: Path) -> None:
    script = """
disk = open_store(directory, page_bytes=100_000)
number = int(sys.argv[2])
while True:
    store(disk, number, 100_000)
    number += 1
    disk.flush(30)
"""
    chance = random.Random(0)
    for number in range(12):
        process = start(script, tmp_path, 1000 * number)
        seen = len(list(tmp_path.rglob("*.kv")))
        while len(list(tmp_path.rglob("*.kv"))) < seen + 3:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(chance.random() / 100)
        kill(process)
    disk = open_store(tmp_path, page_bytes=100_000)
    assert not unfinished(tmp_path)
    numbers = {make_key(n).name: n for start_ in range(0, 12_000, 1000) for n in range(start_, start_ + 1000)}
    for name in disk.names():
        number = numbers[name]
        assert loaded(disk, number) == make_page(number, 100_000)
    assert len(disk.names()) >= 36


def test_what_a_killed_process_was_writing_is_never_used(tmp_path: Path) -> None:
    script = f"""
disk = open_store(directory, page_bytes={LARGE})
for number in range(1000):
    disk.store(make_key(number), lambda page: None)
    disk.flush(60)
"""
    for _ in range(20):
        process = start(script, tmp_path)
        while not any(0 < size_of(path) < LARGE for path in unfinished(tmp_path)):
            assert process.poll() is None
        kill(process)
        if halves := [path for path in unfinished(tmp_path) if size_of(path) < LARGE]:
            break
        shutil.rmtree(tmp_path)
    (half,) = halves
    disk = open_store(tmp_path, page_bytes=LARGE)
    assert not half.exists()
    assert half.name.split(".")[1] not in disk.names()


def size_of(path: Path) -> int:
    """0 where it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_what_a_living_process_is_writing_is_left_to_it(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1 << 40, FINGERPRINT, LARGE)
    disk.store(make_key(1), lambda page: None)  # zeros
    while not any(0 < size_of(path) < LARGE for path in unfinished(tmp_path)):
        assert make_key(1).name not in disk.names()
    open_store(tmp_path)
    assert disk.flush(60)
    assert loaded(disk, 1) == bytes(LARGE)


def test_processes_share_a_directory_and_its_bound(tmp_path: Path) -> None:
    script = """
chance = random.Random(int(sys.argv[2]))
disk = open_store(directory, max_bytes=120_000, page_bytes=10_000)
hits = 0
for _ in range(600):
    number = chance.randrange(30)
    found = loaded(disk, number)
    if found is None:
        store(disk, number, 10_000)
        disk.flush(30)
    else:
        hits += 1
        assert found == make_page(number, 10_000), number
print(hits)
"""
    processes = [start(script, tmp_path, seed) for seed in range(3)]
    sizes = []
    while any(process.poll() is None for process in processes):
        time.sleep(0.02)
        sizes.append(size_while_stopped(tmp_path, processes))
    for process in processes:
        output, errors = finish(process)
        assert not errors and int(output) > 50
    assert len(sizes) > 10 and max(sizes) > 100_000
    assert max(sizes) <= 120_000 + 2 * 11_000  # each of the others may write one file after one has looked


def size_while_stopped(directory: Path, processes: list[subprocess.Popen[str]]) -> int:
    """Of all blocks' files, at one moment."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)  # nothing is sent to one that has ended
    size = sum(map(size_of, directory.rglob("*.kv")))
    for process in processes:
        process.send_signal(signal.SIGCONT)
    return size


def test_a_limit_on_files_is_told_at_the_start_or_costs_blocks(tmp_path: Path) -> None:
    script = """
import resource
def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
disk = open_store(directory)
put(disk, 1)
limit(900)
store(disk, 2), disk.flush(30)
assert loaded(disk, 1) == make_page(1) and loaded(disk, 2) is None
try:
    open_store(directory)
except ConfigError as error:
    print(error)
assert not [path for path in directory.rglob("*") if path.name.endswith(".partial")]
"""
    output, errors = finish(start(script, tmp_path))
    assert "cannot be written: File too large" in errors and errors.count("\n") == 1
    assert output.startswith(f"disk_cache_dir: got '{tmp_path}' (File too large); allowed: a directory that can be")


IN_NAMESPACE = ("unshare", "--map-root-user", "--mount")  # with file systems of its own


@pytest.fixture
def own_mounts() -> tuple[str, ...]:
    if not shutil.which("unshare") or subprocess.run([*IN_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no process have mounts of its own")
    return IN_NAMESPACE


MOUNT = """
import subprocess
def mount(*options): subprocess.run(["mount", *options, directory], check=True)
mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
"""


def test_a_full_disk_gives_up_the_longest_unused(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    script = """
disk = open_store(directory, page_bytes=50_000)
for number in range(100):
    store(disk, number, 50_000)
    disk.flush(30)
    assert loaded(disk, number) == make_page(number, 50_000)
print(len(disk.names()))
(directory / "theirs").write_bytes(bytes(os.statvfs(directory).f_bavail * 4096))
again = open_store(directory, page_bytes=50_000)
print(len(again.names()))
"""
    output, errors = finish(start(MOUNT + script, tmp_path, wrapper=own_mounts))
    kept, left = map(int, output.split())
    assert 12 <= kept <= 20 and kept - 3 <= left <= kept
    assert all("room for" in line or "not Nereid's" in line for line in errors.splitlines())


def test_a_disk_that_others_filled_is_refused_or_costs_blocks(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    script = """
disk = open_store(directory, page_bytes=50_000)
(directory / "theirs").write_bytes(bytes(os.statvfs(directory).f_bavail * 4096))
store(disk, 1, 50_000), disk.flush(30)
assert loaded(disk, 1) is None
for options in ("remount,rw", "remount,ro"):
    mount("-o", options)
    try:
        open_store(directory, page_bytes=50_000)
    except ConfigError as error:
        print(error)
"""
    output, errors = finish(start(MOUNT + script, tmp_path, wrapper=own_mounts))
    reasons = [line.partition("(")[2].partition(")")[0] for line in output.splitlines()]
    assert reasons == ["No space left on device", "Read-only file system"]
    assert "cannot be written: No space left on device" in errors


def test_the_bound_holds_where_files_cannot_be_removed(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    script = """
disk = open_store(directory, max_bytes=160_000, page_bytes=50_000)
for number in range(3):
    store(disk, number, 50_000), disk.flush(30)
for path in directory.rglob("*.kv"):
    subprocess.run(["mount", "--bind", path, path], check=True)  # the system refuses to remove it
store(disk, 3, 50_000), disk.flush(30)
print(*(loaded(disk, number) == make_page(number, 50_000) for number in range(4)))
"""
    output, errors = finish(start(MOUNT + script, tmp_path, wrapper=own_mounts))
    assert output == "True True True False\n"
    assert "cannot be written: no room, and the blocks there cannot be removed" in errors


def test_a_disk_that_becomes_read_only_still_gives_its_blocks(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    script = """
disk = open_store(directory, page_bytes=50_000)
put(disk, 1)
mount("-o", "remount,ro")
store(disk, 2, 50_000), disk.flush(30)
print(loaded(disk, 1) == make_page(1, 50_000), loaded(disk, 2))
"""
    script = script.replace("put(disk, 1)", "store(disk, 1, 50_000), disk.flush(30)")
    output, errors = finish(start(MOUNT + script, tmp_path, wrapper=own_mounts))
    assert output == "True None\n" and "cannot be written: Read-only file system" in errors


def test_blocks_put_here_are_found_there(tmp_path: Path) -> None:
    put(open_store(tmp_path), *range(5))
    output, _ = finish(
        start("print(all(loaded(open_store(directory), n) == make_page(n) for n in range(5)))", tmp_path)
    )
    assert output == "True\n"
