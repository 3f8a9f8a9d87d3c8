"""What /proc and control groups say of memory is read right: both versions, nested, in containers, without bounds."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from nereid.memory.cgroups import GroupMemory, memory_groups
from nereid.memory.meters import CpuMeter
from nereid.memory.reading import MemoryReading

V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNTS = (
    "23 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)
UNLIMITED = "9223372036854771712"
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v1(folder: str, limit: str, usage: int = 0, droppable: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"cache 5\nrss 7\ntotal_cache 99\ntotal_inactive_file {droppable}\n",
    }


def v2(folder: str, limit: str, usage: int = 0, droppable: int = 0, high: str = "max") -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 7\nfile 99\ninactive_file {droppable}\nactive_file 3\n",
    }


def proc(mounts: str, groups: str) -> dict[str, str]:
    return {"proc/self/mountinfo": OTHER_MOUNTS + mounts, "proc/self/cgroup": groups}


def test_version_2_counts_every_group_above_its_own(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup"
    files = proc(V2_MOUNT.format(root="/"), "0::/serving/nereid\n")
    files |= v2(f"{mount}/serving/nereid", "3000", 700, 200) | v2(f"{mount}/serving", "max", 900, 0, high="2000")
    assert memory_groups(write(tmp_path, files)) == (GroupMemory(3000, 500), GroupMemory(2000, 900))


def test_version_2_without_bounds_bounds_nothing(tmp_path: Path) -> None:
    files = proc(V2_MOUNT.format(root="/"), "0::/a\n") | v2("sys/fs/cgroup/a", "max", 900)
    assert memory_groups(write(tmp_path, files)) == ()


def test_version_1_is_told_by_its_controller_beside_an_empty_version_2(tmp_path: Path) -> None:
    files = proc(
        V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/").replace("cgroup rw,nosuid", "cgroup/unified rw"),
        "9:name=systemd:/\n4:cpu,memory:/a/b\n1:cpu:/x\n0::/\n",
    )
    mount = "sys/fs/cgroup/memory"
    files |= v1(mount, UNLIMITED, 10**10) | v1(f"{mount}/a", "5000", 100, 300) | v1(f"{mount}/a/b", "8000", 60, 10)
    expected = (GroupMemory(8000, 50), GroupMemory(5000, 0), GroupMemory(int(UNLIMITED), 10**10))
    assert memory_groups(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("/docker/7f", "/docker/7f", 1000),  # the mount begins at the container's own group
        ("/docker/7f", "/docker/7f/inner", 400),
        ("/", "/docker/7f", 1000),  # the path is the host's, the mount the container's
        ("/docker/7f", "/docker/8e", 1000),
        ("/", "/../7f", 1000),  # the process is outside of the namespace's root
        ("/docker/7", "/docker/7f", 1000),
    ],
)
def test_in_a_container_the_mounted_group_counts(tmp_path: Path, root: str, path: str, expected: int) -> None:
    files = proc(V1_MOUNT.format(root=root), f"4:memory:{path}\n")
    files |= v1("sys/fs/cgroup/memory", "1000") | v1("sys/fs/cgroup/memory/inner", "400")
    assert min(group.limit for group in memory_groups(write(tmp_path, files))) == expected


def test_a_mount_with_a_blank_and_a_machine_without_groups(tmp_path: Path) -> None:
    blank = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup", "/my\\040groups")
    files = proc(blank, "0::/\n") | v2("my groups", "77")
    assert memory_groups(write(tmp_path / "a", files)) == (GroupMemory(77, 0),)
    assert memory_groups(tmp_path / "nothing") == ()


def machine(limit_mib: int, usage_mib: int) -> dict[str, str]:
    status = "Name:\tx\nVmSize:\t  9000 kB\nVmHWM:\t  5000 kB\nVmRSS:\t  4000 kB\nThreads:\t3\n"
    meminfo = f"MemTotal:       {1000 << 10} kB\nMemFree:  1 kB\nMemAvailable:   {600 << 10} kB\nHugePages_Total:  0\n"
    files = proc(V2_MOUNT.format(root="/"), "0::/a\n") | {"proc/self/status": status, "proc/meminfo": meminfo}
    return files | v2("sys/fs/cgroup/a", str(limit_mib * MIB), usage_mib * MIB)


@pytest.mark.parametrize(
    ("limit", "usage", "total", "available"),
    [
        (2000, 100, 1000, 600),  # MiB: the machine has less than the group may take
        (800, 100, 800, 600),  # the group may take more than the machine has now
        (800, 300, 800, 500),
        (800, 900, 800, 0),
    ],
)
def test_a_reading_is_the_lesser_of_machine_and_groups(
    tmp_path: Path, limit: int, usage: int, total: int, available: int
) -> None:
    reading = CpuMeter(write(tmp_path, machine(limit, usage))).read()
    assert reading == MemoryReading(total * MIB, available * MIB, 4000 << 10, 5000 << 10)


def test_a_peak_that_cannot_be_forgotten_is_told_all_the_same(tmp_path: Path) -> None:
    meter = CpuMeter(write(tmp_path, machine(800, 100)))
    (tmp_path / "proc/self/clear_refs").mkdir()
    meter.forget_peak()
    assert meter.read().peak == 5000 << 10


def test_the_peak_of_this_process_is_measured_and_forgotten() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs a writable /proc/self/clear_refs")
    meter = CpuMeter()
    meter.forget_peak()
    before = meter.read()
    torch.ones(64 * MIB, dtype=torch.uint8)
    after = meter.read()
    assert 56 * MIB <= after.peak - before.held <= 80 * MIB
    meter.forget_peak()
    assert meter.read().peak - before.held <= 16 * MIB


def test_within_bounds_more_than_is_available_raises() -> None:
    meter = CpuMeter()
    size, before = meter.read().available + (1 << 30), resource.getrlimit(resource.RLIMIT_AS)
    with meter.bounded():
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(size, dtype=torch.uint8)
        torch.empty(MIB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
