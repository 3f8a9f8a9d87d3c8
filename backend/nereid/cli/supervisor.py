"""Supervisor: holds a running server until it ends: passes signals on, and notices when something dies.

Always holds: the first stop signal (Ctrl-C, SIGTERM, a terminal that is closed) lets the server drain, the second one
ends it at once; a server whose Python process has died is ended too: it would look healthy and answer nothing.
"""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from nereid.cli.server_process import HOST, TritonServer
from nereid.errors import ServerError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal is gone."""

_POLL_S = 0.25
_STUB_SCAN_S = 2.0
_DRAIN_SLACK_S = 10.0
_ENDING = (
    b"\nnereid: ending; requests that run get up to %d s, or their model's drain_timeout_s where that is less; "
    b"once more to end at once\n"
)
_CLEAN = (0, -signal.SIGTERM)  # the second: before it had set up its own handling, with nothing to drain


class Supervisor:
    """Owns the process's handlers of the stop signals from `install` on."""

    def __init__(self, server: TritonServer, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._stop_asked_at: float | None = None
        self._killed = False
        self._watch: StubWatch | None = None

    def install(self) -> None:
        """Take the signals."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._on_signal)

    def models_are_ready(self) -> None:
        """From here on a model's Python process that is gone is one that died."""
        self._watch = StubWatch(self._server)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked the server to end."""
        return self._stop_asked_at is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A handler must not print: it may have interrupted a print.
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
            self._server.terminate()
            limit_s = self._server.options.exit_timeout_s
            os.write(2, _ENDING % limit_s)
        else:
            self._kill()

    def _kill(self) -> None:
        self._killed = True
        self._server.kill()

    def run(self) -> int:
        """Return when the server has ended after it was asked to: 0 where it drained, 1 where it was killed.

        Raises ServerError where it, or a model's Python process, ended by itself.
        """
        try:
            while (status := self._server.wait(_POLL_S)) is None:
                self._check_drain()
                if self._watch and not self.stopping and (dead := self._watch.dead_model()):
                    self._server.kill()  # it cannot drain: it would wait for the dead process
                    raise ServerError(f"the Python process of model {dead} ended by itself; the server is stopped")
        finally:
            status = self._server.stop()
        return self._result(status)

    def _check_drain(self) -> None:
        limit = self._server.options.exit_timeout_s + _DRAIN_SLACK_S
        if self._stop_asked_at is not None and time.monotonic() - self._stop_asked_at > limit:
            self._kill()

    def _result(self, status: int) -> int:
        if not self.stopping:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            raise ServerError(f"the server ended by itself {how}; its log: {self._server.options.log}")
        if self._killed or status not in _CLEAN:
            self._say(
                f"the server ended with status {status} before it had drained; its log: {self._server.options.log}"
            )
            return 1
        self._say("the server has drained and ended")
        return 0


class StubWatch:
    """Notices that a model's Python process is gone while the server still calls the model ready."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._models = frozenset(server.stub_models())
        self._suspects: frozenset[str] = frozenset()
        self._next_scan = time.monotonic()

    def dead_model(self) -> str | None:
        """The name of such a model, found in two scans in a row: an unload or reload in between is none."""
        if time.monotonic() < self._next_scan:
            return None
        self._next_scan = time.monotonic() + _STUB_SCAN_S
        models = frozenset(self._server.stub_models())
        gone = (self._models | self._suspects) - models
        suspects = frozenset(model for model in gone if self._is_ready(model))
        dead = next(iter(suspects & self._suspects), None)
        self._models, self._suspects = models, suspects
        return dead

    def _is_ready(self, model: str) -> bool:
        connection = http.client.HTTPConnection(HOST, self._server.options.http_port, timeout=2.0)
        try:
            connection.request("GET", f"/v2/models/{model}/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
