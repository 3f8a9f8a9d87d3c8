"""Meters: a device's memory, and the most that this process held of it over a time.

A peak is of the whole process: nothing else should be loaded beside what is measured.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from nereid.memory.cgroups import memory_groups
from nereid.memory.reading import MemoryReading

_FORGET_PEAK = "5"  # what Linux's /proc/self/clear_refs takes for it


class Meter(Protocol):
    """One device's."""

    def forget_peak(self) -> None:
        """Let the peak be what is held now."""
        ...

    def read(self) -> MemoryReading: ...

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        """Within it, taking more than is available raises RuntimeError or MemoryError."""
        ...


def meter_of(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


class CpuMeter:
    """The machine's memory, or what control groups let this process have of it. Held is what is resident."""

    def __init__(self, root: Path = Path("/")) -> None:
        """root: where the file system begins."""
        self._root = root
        self._proc = root / "proc"

    def forget_peak(self) -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it; the peak is then that of the whole load
            (self._proc / "self/clear_refs").write_text(_FORGET_PEAK)

    def read(self) -> MemoryReading:
        machine, process = _sizes(self._proc / "meminfo"), _sizes(self._proc / "self/status")
        groups = memory_groups(self._root)
        return MemoryReading(
            total=min([machine["MemTotal"], *(group.limit for group in groups)]),
            available=max(0, min([machine["MemAvailable"], *(group.limit - group.used for group in groups)])),
            held=process["VmRSS"],
            peak=max(process["VmHWM"], process["VmRSS"]),
        )

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """By the process's address space, since the system itself gives out more than it has and then ends somebody."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        bound = _sizes(self._proc / "self/status")["VmSize"] + self.read().available
        if soft != resource.RLIM_INFINITY:
            bound = min(bound, soft)
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class CudaMeter:
    """A GPU's memory. Held is what torch's allocator holds, so that it counts what fragments; the CUDA context is not
    in it, but is not available either."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def forget_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        held, peak = torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_reserved(self._device)
        return MemoryReading(total, free, held, peak)

    def bounded(self) -> contextlib.AbstractContextManager[None]:
        """The device refuses by itself."""
        return contextlib.nullcontext()


def _sizes(path: Path) -> dict[str, int]:
    """Bytes by name, of a file with lines `name: number kB`."""
    fields = (line.split() for line in path.read_text("utf-8", "replace").splitlines())
    return {field[0].rstrip(":"): int(field[1]) << 10 for field in fields if len(field) == 3 and field[2] == "kB"}
