"""The processes of one session and what they listen on, read from /proc; and tying a child to its parent's life.

A server is started as the leader of a session of its own, so its stubs are found by that session, also after the
server itself is gone and they belong to init.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ENDED_STATES = "ZXx"
_ADDRESS, _STATE, _INODE = 1, 3, 9  # columns of /proc/net/tcp
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One living process."""

    pid: int
    command: tuple[str, ...]


def session_processes(session: int) -> list[Process]:
    """The living processes of `session` (zombies do not live)."""
    return [p for entry in Path("/proc").iterdir() if entry.name.isdigit() and (p := _read(entry, session))]


def _read(entry: Path, session: int) -> Process | None:
    try:
        # The second field, the name, is in parentheses and may hold spaces: what follows the last one is split.
        state, _parent, _group, its_session = (
            (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:4]
        )
        if int(its_session) != session or state in _ENDED_STATES:
            return None
        command = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # it ended while we were reading
    return Process(int(entry.name), tuple(command))


def listens(pid: int, host: str, port: int) -> bool:
    """Whether the process `pid`, and no other, accepts connections on the IPv4 address `host`:`port`."""
    # /proc writes an address as the number that its four bytes, in network order, are to this machine.
    address = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    sockets = {f"socket:[{row[_INODE]}]" for row in rows if row[_ADDRESS] == address and row[_STATE] == _LISTEN}
    return any(_target(link) in sockets for link in _entries(Path(f"/proc/{pid}/fd")))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed while we were reading
        return ""


def free_ports(host: str, count: int) -> list[int]:
    """Ports of `host` that nobody listens on just now."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def kill_session(session: int) -> None:
    """SIGKILL every process of `session`."""
    for process in session_processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def tie_to_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None]:
    """For a child to call before exec: it then gets the signal when the thread that started it ends, however it ends.

    signal_number: a child that may be stopped (SIGSTOP) then hears SIGKILL alone.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec there must be no import
    parent = os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return tie
