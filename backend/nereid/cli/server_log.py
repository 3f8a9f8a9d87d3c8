"""Reads a tritonserver log: why a model did not load, in one line. Copies a log to the terminal as it grows."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

# The server writes a reason's line ends as backslash and n.
_LOAD_FAILURE = re.compile(
    r"""failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.+?)(?:\\n\\nAt:.*)?"?$""", re.M
)
_POLL_FAILURE = re.compile(r'Poll failed for model directory \'(?P<model>[^\']+)\': (?P<reason>.+?)"?$', re.M)
_ERROR_LINE = re.compile(r"^(?:E\d{4} .*?\] |error: |.*tritonserver: )(?P<text>.+)$", re.M)
_CODE = re.compile(r"^(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown): ")
_POLL_S = 0.1


def load_failure(log: Path) -> str:
    """Why the server did not become ready, as its log says it, in one line."""
    text = log.read_text("utf-8", "replace")
    for pattern in (_LOAD_FAILURE, _POLL_FAILURE):
        if match := pattern.search(text):
            return f"model {match['model']} did not load: {_CODE.sub('', _one_line(match['reason']))}"
    if errors := _ERROR_LINE.findall(text):
        return f"the server did not start: {_one_line(errors[-1])}"
    last = text.strip().splitlines()[-1:]
    return f"the server did not start: {_one_line(last[0]) if last else 'it gave no reason'}"


def _one_line(text: str) -> str:
    return " ".join(text.replace("\\n", " ").strip().strip('"').split())


class LogCopy:
    """Copies what is added to `log` to stderr, in a thread of its own, until `stop`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="log-copy", daemon=True)

    def start(self) -> None:
        """The log must exist."""
        self._thread.start()

    def stop(self) -> None:
        """Copy the rest and end."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _copy(self) -> None:
        with self._log.open("rb") as file:
            ended = False
            while not ended:
                ended = self._ended.wait(_POLL_S)
                sys.stderr.buffer.write(file.read())
                sys.stderr.flush()
