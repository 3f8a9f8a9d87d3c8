"""GuideChecker: has guides compiled in a process that may fail, so that the serving one never does. Owns that process
and the socket to it; used by one thread.

Bounds: a guide gets `deadline_s` seconds and `memory_bytes` of address space. The process is started by the first
guide and kept; one that was killed, died or has grown is followed by another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from nereid.errors import RequestError
from nereid.request import Guide

if TYPE_CHECKING:
    from nereid.guided.library import Vocabulary

_LOG = logging.getLogger(__name__)
DEADLINE_S = 5.0
MEMORY_BYTES = 512 << 20
STACK_BYTES = 512 << 20  # of whatever thread compiles
_START_S = 60.0  # to load the library and the tokenizer, on a busy machine
# How a process dies whose memory, or stack, is not enough, or in which the library fails: the guide's own doing.
_FAULTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class _Child:
    """end: to be called once it is not needed; kills, waits and closes, and does so by itself at the owner's end."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    lines: IO[bytes]
    end: weakref.finalize[..., Any]


class GuideChecker:
    """Ask `refusal` of each guide before it is compiled here."""

    def __init__(
        self, vocabulary: Vocabulary, deadline_s: float = DEADLINE_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._settings = {
            "vocabulary": dataclasses.asdict(vocabulary),
            "deadline_s": deadline_s,
            "memory_bytes": memory_bytes,
        }
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The process that checks, where there is one."""
        return self._child.process.pid if self._child else None

    def refusal(self, guide: Guide) -> str | None:
        """Why the guide is refused, None where it may be compiled.

        Raises TimeoutError, which says so, where the deadline passed; RequestError (INTERNAL) where there is no process
        to ask, or it was ended by something else: the next call starts another.
        """
        question = {"kind": guide.kind.value, "source": guide.source}
        try:
            answer = self._answer(question)
        except TimeoutError as error:
            self._end()
            raise TimeoutError(f"it takes more than {self._deadline_s:g} s to compile") from error
        except (OSError, ValueError) as error:
            return self._reason_of_death(error)
        if answer["worn"]:
            self._end()
        reason: str | None = answer["reason"]
        return reason

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return _ask(self._started(), question, self._deadline_s)
        except ConnectionError:  # it was dying when it was asked: it had not read the question, which killed nobody
            self._end()
            return _ask(self._started(), question, self._deadline_s)

    def _started(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:  # ended between two guides
            self._end()
        if self._child is None:
            try:
                self._child = child = self._start()
                _ask(child, self._settings, _START_S)
            except (OSError, ValueError) as error:
                self._end()
                raise _failure(f"no process to check them could be started: {error}") from error
        return self._child

    def _start(self) -> _Child:
        ours, its = socket.socketpair()
        try:
            process = subprocess.Popen(
                # Isolated: neither the working directory nor the environment decides what is imported.
                [sys.executable or "python3", "-I", "-m", "nereid.guided.checker"],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        lines = ours.makefile("rb")
        return _Child(process, ours, lines, weakref.finalize(self, _end, process, ours, lines))

    def _reason_of_death(self, error: Exception) -> str:
        child, self._child = self._child, None
        assert child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(self._deadline_s)  # it closes its socket a little before it is gone
        child.end()
        code = child.process.returncode
        if -code in _FAULTS:
            return f"the library fails on it, or it takes more than {self._memory_bytes >> 20} MiB to compile"
        raise _failure(f"the process that checks them ended with {code}") from error

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _ask(child: _Child, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Raises TimeoutError; ConnectionError where the process ended before it had read the message, ValueError after."""
    child.connection.settimeout(timeout_s)
    child.connection.sendall(json.dumps(message).encode("ascii") + b"\n", socket.MSG_NOSIGNAL)
    answer: dict[str, Any] = json.loads(child.lines.readline())
    return answer


def _end(process: subprocess.Popen[bytes], connection: socket.socket, lines: IO[bytes]) -> None:
    process.kill()
    process.wait()
    lines.close()
    connection.close()


def _failure(reason: str) -> RequestError:
    _LOG.error("guides cannot be checked: %s", reason)
    return RequestError(f"guides cannot be compiled now: {reason}")
