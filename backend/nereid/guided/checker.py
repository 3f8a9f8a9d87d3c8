"""The program of the process that compiles guides first: python -m nereid.guided.checker, started by GuideChecker.

Nothing that is read from a source says for sure what the library will do with it. So each guide is compiled here, with
its first mask, before the process that serves compiles it too: memory is bounded by the system, and time by the other
side, which kills. Reads from the socket that is its standard input, line by line as JSON: a Vocabulary, and then
guides; answers each with a line, the first to say that it is ready.

Invariant: this process ends when the other side is gone: by the end of its input, or while it compiles, by an alarm.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import threading
from pathlib import Path
from typing import IO, Any

from nereid.errors import GuideError
from nereid.guided.check_process import STACK_BYTES
from nereid.guided.library import GuideLibrary, Vocabulary
from nereid.guided.limits import SourceError
from nereid.request import Guide, GuideKind

_WORN = 2  # one of so many parts of the memory allowed that is not given back: a new process is to follow
_BACKLOG_S = 2.0


def main() -> None:
    """Serve on a stack that is as large as that of the thread which compiles in the serving process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, meant for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, daemon=True)
    thread.start()
    thread.join()


def _serve() -> None:
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rb") as lines:
        settings = _receive(lines)
        library = GuideLibrary(Vocabulary(**settings["vocabulary"]))
        start = _address_space()
        limit = start + settings["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _send(connection, {"ready": True})
        while request := _receive(lines):
            signal.alarm(math.ceil(settings["deadline_s"] + _BACKLOG_S))
            reason = _reason(library, Guide(GuideKind(request["kind"]), request["source"]))
            signal.alarm(0)
            worn = _address_space() - start > settings["memory_bytes"] // _WORN
            _send(connection, {"reason": reason, "worn": worn})


def _reason(library: GuideLibrary, guide: Guide) -> str | None:
    """Why the guide is refused."""
    try:
        library.compile(guide)
    except (SourceError, GuideError) as error:
        return str(error)
    except BaseException as error:  # a panic of the library is no Exception
        return f"the library failed: {type(error).__name__}"
    return None


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()


def _receive(lines: IO[bytes]) -> dict[str, Any]:
    """Empty where the other side is gone."""
    line = lines.readline()
    received: dict[str, Any] = json.loads(line) if line else {}
    return received


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
