"""Where a process's time goes, by thread: on the processor, and waiting for the interpreter's lock (the GIL).

Time on the processor is the system's own count for each thread, native ones too. Waiting is sampled by py-spy, with
native frames: the interpreter waits for its lock on a condition variable, and for nothing else does it use one, so a
sample of a thread whose innermost known frames are such a wait, called by the interpreter itself, is one that waits for
the lock. A share of samples is a share of time; taking one stops the process for about a millisecond. Always holds: the
process is looked at from outside, and runs no other code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import sysconf
from pathlib import Path
from time import monotonic

from nereid.bench import peer_venvs, tables
from nereid.errors import NereidError
from nereid.paths import Progress

_SAMPLES_PER_S = 40
_TIMEOUT_S = 300.0
_THREAD = re.compile(r"thread \((?P<id>\d+)\): ?(?P<name>.*)")
_LOCK_WAITS = ("pthread_cond_timedwait", "take_gil")
_INTERPRETER = re.compile(r"\((?:[^()]+\.py:\d+|[^()]+\.[ch]:\d+|libpython[\w.]*)\)$")
_FILE = re.compile(r"\((?P<file>[^()]+\.py):\d+\)$")
_MAIN_FILES = 6


@dataclass(frozen=True, slots=True)
class ThreadSamples:
    """What was seen of one thread. lock_waits: samples in which it waited for the interpreter's lock.  files: samples
    by the innermost Python file."""

    name: str
    count: int
    lock_waits: int
    files: Mapping[str, int]


def read_samples(raw: str) -> dict[int, ThreadSamples]:
    """By the system's thread id; raw: py-spy's format of that name, a stack and its count a line."""
    counts: Counter[tuple[int, str]] = Counter()
    waits: Counter[int] = Counter()
    files: dict[int, Counter[str]] = {}
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        head, *frames = stack.split(";")
        if match := _THREAD.fullmatch(head):
            thread = int(match["id"])
            counts[thread, match["name"]] += int(count)
            waits[thread] += int(count) * _waits_for_lock(frames)
            inner = next((found["file"] for frame in reversed(frames) if (found := _FILE.search(frame))), "native code")
            files.setdefault(thread, Counter())[inner] += int(count)
    return {
        thread: ThreadSamples(name, count, waits[thread], files[thread]) for (thread, name), count in counts.items()
    }


def _waits_for_lock(frames: Sequence[str]) -> bool:
    for caller, frame in zip(["", *frames], frames, strict=False):
        if frame.startswith(_LOCK_WAITS):
            return frame.startswith("take_gil") or bool(_INTERPRETER.search(caller))
    return False


@dataclass(frozen=True, slots=True)
class Profile:
    """busy: by thread id, the share of the time that it was on a processor.  samples: of those that run Python."""

    busy: Mapping[int, float]
    samples: Mapping[int, ThreadSamples]


def profile(pid: int, seconds: int, say: Progress) -> Profile:
    """Look at the process `pid` for so long. Raises NereidError where this user may not."""
    program = peer_venvs.python_of("py-spy", say).with_name("py-spy")
    with tempfile.TemporaryDirectory(prefix="nereid-bench-") as folder:
        output = Path(folder) / "samples.txt"
        options = ["--format", "raw", "--threads", "--idle", "--native", "--rate", str(_SAMPLES_PER_S)]
        command = [str(program), "record", "--pid", str(pid), "--duration", str(seconds), "--output", str(output)]
        before, started = _ticks(pid), monotonic()
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=seconds + _TIMEOUT_S, check=False
        )
        elapsed, after = monotonic() - started, _ticks(pid)
        if done.returncode != 0 or not output.exists():
            raise NereidError(f"py-spy cannot look at the process {pid}: {done.stderr.strip()[-300:]}")
        per_tick = 1 / sysconf("SC_CLK_TCK") / elapsed
        busy = {thread: (ticks - before.get(thread, 0)) * per_tick for thread, ticks in after.items()}
        return Profile(busy, read_samples(output.read_text("utf-8", "replace")))


def _ticks(pid: int) -> dict[int, int]:
    """Processor time of each thread of `pid` until now."""
    ticks = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we were reading
        ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    return ticks


def describe(found: Profile) -> str:
    """A table of threads, the busiest first; those without Python are one row. Then where the main ones were."""
    named = sorted(found.samples, key=lambda thread: -found.busy.get(thread, 0.0))
    rows = []
    for thread in named:
        seen = found.samples[thread]
        waiting = tables.number(seen.lock_waits / seen.count * 100, 1, " %")
        rows.append([seen.name or "unnamed", _per_cent(found.busy.get(thread, 0.0)), waiting])
    native = [share for thread, share in found.busy.items() if thread not in found.samples]
    rows.append([f"{len(native)} native threads", _per_cent(sum(native)), "-"])
    head = ("thread", "on a processor", "waiting for the GIL")
    return "\n\n".join([tables.table(head, rows), *(_where(found.samples[thread]) for thread in named[:3])])


def _per_cent(share: float) -> str:
    return tables.number(share * 100, 1, " %")


def _where(seen: ThreadSamples) -> str:
    main = sorted(seen.files.items(), key=lambda item: -item[1])[:_MAIN_FILES]
    shares = ", ".join(f"{file} {_per_cent(count / seen.count)}" for file, count in main)
    return f"{seen.name or 'unnamed'}, idle or not, by the innermost Python file: {shares}"
