"""TritonServer: one tritonserver process: starts it, waits until it is ready, watches it, ends it.

Always holds: after `stop` or `clean` no process and no shared-memory file of this server is left; whatever else runs
on the machine is not touched. The server gets SIGTERM should this process die first.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from nereid.cli.provision import libpython_folder
from nereid.cli.server_log import load_failure
from nereid.errors import ServerError
from nereid.processes import kill_session, listens, session_processes, tie_to_parent

HOST = "127.0.0.1"
_SHM = Path("/dev/shm")
_POLL_S = 0.05
_KILL_GRACE_S = 10.0
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to start a server. exit_timeout_s: how long it waits for running requests when told to end;
    a model of Nereid's ends its own after its `drain_timeout_s`."""

    tree: Path
    repository: Path
    models: tuple[str, ...]
    http_port: int
    grpc_port: int
    metrics_port: int
    log: Path
    exit_timeout_s: int = 30
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class TritonServer:
    """A context manager that starts the server and stops it at the end; or start, wait_ready and stop by hand."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        # A prefix of its own: the files that a killed server leaves can be told from every other server's.
        self._shm_prefix = f"nereid_{os.getpid()}_{uuid.uuid4().hex[:8]}_"

    @property
    def pid(self) -> int:
        """Raises ServerError before `start`."""
        return self._started.pid

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not started")
        return self._process

    def start(self) -> None:
        """Start the process; it is not ready yet. The calling thread must live as long as the server should."""
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        with self.options.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which then asks the server
                preexec_fn=tie_to_parent(),
            )

    def _command(self) -> list[str]:
        o = self.options
        ports = {"http": o.http_port, "grpc": o.grpc_port, "metrics": o.metrics_port}
        return [
            str(o.tree / "bin" / "tritonserver"),
            f"--model-repository={o.repository}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in o.models),
            f"--backend-directory={o.tree / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            *(f"--{kind}-address={HOST}" for kind in ports),
            *(f"--{kind}-port={port}" for kind, port in ports.items()),
            f"--exit-timeout-secs={o.exit_timeout_s}",
            *o.extra,
        ]

    def _environment(self) -> dict[str, str]:
        """The stub takes its packages from the first python3 on PATH, and its libpython from the loader's path."""
        environment = {**os.environ, **self.options.environment}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        if folder := libpython_folder():
            others = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = f"{folder}{os.pathsep}{others}" if others else str(folder)
        return environment

    def wait_ready(self, timeout_s: float = 1800.0, waiting: Callable[[], None] = lambda: None) -> None:
        """Return when every model is loaded. `waiting` is called about every 50 ms.

        Raises ServerError with the server's own reason where it ends, or is not ready within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._answers_ready():
            if self.wait(_POLL_S) is not None:
                raise ServerError(self._why_not_ready())
            if time.monotonic() > deadline:
                raise ServerError(f"the server is not ready after {timeout_s:.0f} s; its log: {self.options.log}")
            waiting()

    def _why_not_ready(self) -> str:
        reason = load_failure(self.options.log)
        return f"{reason}; the server's log: {self.options.log}"

    def _answers_ready(self) -> bool:
        if not listens(self.pid, HOST, self.options.http_port):
            return False  # nobody answers yet, or another server does that took the port in the meantime
        connection = http.client.HTTPConnection(HOST, self.options.http_port, timeout=5.0)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stubs(self) -> dict[str, int]:
        """The models that have a Python process now, and its id. A stub is given MODEL/VERSION/model.py to run."""
        stubs = (p for p in session_processes(self.pid) if Path(p.command[0]).name == _STUB)
        return {Path(stub.command[1]).parent.parent.name: stub.pid for stub in stubs if len(stub.command) > 1}

    def stub_models(self) -> set[str]:
        """The models that have a Python process now, by name."""
        return set(self.stubs())

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, negative for a signal, or None where the server still runs after `timeout_s`."""
        try:
            return self._started.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the server to finish its requests, unload its models and end. Safe in a signal handler."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the server at once; `clean` when it has ended. Safe in a signal handler."""
        if self._process is not None:
            self._process.kill()

    def clean(self) -> None:
        """Remove what a server that has ended left: stubs without a parent, shared-memory files."""
        kill_session(self.pid)
        for path in _SHM.glob(f"{self._shm_prefix}*"):
            path.unlink(missing_ok=True)

    def stop(self) -> int:
        """Let the server drain, kill it where it takes too long, clean up. Returns its exit status."""
        self.terminate()
        status = self.wait(self.options.exit_timeout_s + _KILL_GRACE_S)
        if status is None:
            self.kill()
            status = self._started.wait()
        self.clean()
        return status

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
