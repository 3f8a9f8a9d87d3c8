"""A worker as its parent sees it: a process that is started, asked, stopped while others compute, and ended.

Always holds: a worker that is not asked does not run (SIGSTOP), so that it takes nothing of the processor; and none is
left, however its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nereid.bench.quiet import read_times, taken_by_others
from nereid.bench.worker_loop import Answer
from nereid.bench.workloads import Workload
from nereid.errors import NereidError
from nereid.paths import cache_dir
from nereid.processes import kill_session, tie_to_parent

_LOAD_TIMEOUT_S = 1800.0
_JOB_TIMEOUT_S = 600.0
_ANSWER_MARGIN_S = 200.0  # beyond the job's own time
_END_S = 20.0
_SOURCES = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker runs. python: of its own environment.  module: of this room.  settings: what it is told first."""

    name: str
    python: Path
    module: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One job done: as `worker_loop.run_job` gives it, and mean milliseconds by part of a step, where they are told.
    taken: share of all cores that others took meanwhile, from 0 to 1."""

    answers: Sequence[Answer]
    parts: Mapping[str, float]
    taken: float


class Worker:
    """One engine in a process of its own. `start`, `ask` as often as wanted, `close`; or as a context manager."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="nereid-bench-")
        self._log = cache_dir() / "logs" / f"bench-{program.name}.log"
        self.load_s = 0.0
        self.versions: Mapping[str, str] = {}

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the worker is not started"
        return self._process

    def start(self) -> None:
        """Start it, and wait until its engine is loaded; it is stopped then. Raises NereidError."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(self._program.python), "-m", self._program.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
                cwd=self._folder.name,  # what an engine writes beside itself is removed with it
                start_new_session=True,
                preexec_fn=tie_to_parent(signal.SIGKILL),  # a process that is stopped hears no other
            )
        ready = self._exchange(self._program.settings, _LOAD_TIMEOUT_S)
        self.load_s, self.versions = ready["load_s"], ready["versions"]
        self._signal(signal.SIGSTOP)

    def _environment(self) -> dict[str, str]:
        """Programs of the worker's environment come first, such as what an engine compiles with."""
        path = f"{self._program.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(_SOURCES)}

    def ask(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Reply:
        """Have it do `workload`, with these prompts, while every other worker is stopped. Raises NereidError."""
        requests = [
            [arrival.at, list(prompt), arrival.num_output_tokens]
            for arrival, prompt in zip(workload.arrivals, prompts, strict=True)
        ]
        self._signal(signal.SIGCONT)
        job = {"requests": requests, "timeout_s": _JOB_TIMEOUT_S}
        before = read_times(self.pid)
        reply = self._exchange(job, 2 * _JOB_TIMEOUT_S + _ANSWER_MARGIN_S)
        taken = taken_by_others(before, read_times(self.pid))
        self._signal(signal.SIGSTOP)
        answers = tuple(Answer(**answer) for answer in reply["answers"])
        return Reply(answers, reply["parts"], taken)

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> Any:
        assert self._running.stdin is not None and self._running.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = ""
        with contextlib.suppress(BrokenPipeError):  # it has ended: what follows says so
            print(json.dumps(message), file=self._running.stdin, flush=True)
            # One line is due, so that nothing can be left in the buffer before it.
            if select.select([self._running.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                line = self._running.stdout.readline()
            else:
                raise NereidError(f"{self._program.name}: no answer after {timeout_s:.0f} s; its log: {self._log}")
        reply = json.loads(line) if line else {"error": "it has ended"}
        if "error" in reply:
            raise NereidError(f"{self._program.name}: {reply['error']}; its log: {self._log}")
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running.pid, number)

    def close(self) -> None:
        """Let it end, or end it. Safe to call twice, and before `start`."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            kill_session(self._process.pid)
            self._process.wait()
            self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Worker:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
