"""`nereid serve`: from nothing to a server that answers, in the foreground until a signal.

Always holds: what can be wrong with the command, the ports, the models or this machine is said in one line before the
server is started; whatever happens later, no process of the server outlives this one.
"""

from __future__ import annotations

import http.client
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nereid.cli.checks import project_root
from nereid.cli.provision import SERVER_VERSION, provision_server
from nereid.cli.report import Report
from nereid.cli.repository import PreparedModel, choose_models, prepare_models
from nereid.cli.sample import curl_command, sample_prompt, stream_answer, streams
from nereid.cli.server_log import LogCopy
from nereid.cli.server_process import HOST, ServerOptions, TritonServer
from nereid.cli.supervisor import Supervisor
from nereid.errors import ConfigError, ServerError
from nereid.paths import cache_dir

_DEFAULT_MODEL = "smollm2"
_SIGTERM_STATUS = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command's arguments. repository: None is the project's own; no models: all of a given repository."""

    repository: Path | None
    models: tuple[str, ...]
    http_port: int
    grpc_port: int
    metrics_port: int
    log_verbose: bool
    extra: tuple[str, ...]


def serve(options: ServeOptions) -> int:
    """Serve until a signal. Returns 0 after a drain, 1 after a kill.

    Raises NereidError (any) where the server cannot be had, does not start, or ends by itself.
    """
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    repository, models = _choose(options)
    check_ports({"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port})
    report = Report(steps=3)
    started = time.monotonic()
    report.step(f"Triton server {SERVER_VERSION}")
    tree = provision_server(report.detail)
    report.done(str(tree))
    report.step(f"model files for {', '.join(models)}")
    prepared = prepare_models(repository, models, report.detail)
    report.done(", ".join(str(p) for p in dict.fromkeys(model.directory for model in prepared)) or "none needed")
    server = TritonServer(
        ServerOptions(
            tree=tree,
            repository=repository,
            models=models,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            log=cache_dir() / "logs" / f"tritonserver-{options.http_port}.log",
            extra=options.extra,
        )
    )
    return _run(server, prepared, report, started, verbose=options.log_verbose)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    """Until the server runs: leave through every `finally` on the way."""
    raise SystemExit(_SIGTERM_STATUS)


def _choose(options: ServeOptions) -> tuple[Path, tuple[str, ...]]:
    if options.repository is None:
        repository = project_root() / "model_repository"
        return repository, choose_models(repository, options.models or (_DEFAULT_MODEL,))
    repository = options.repository.expanduser().absolute()
    return repository, choose_models(repository, options.models)


def check_ports(ports: dict[str, int]) -> None:
    """ports: option name to port. Raises ConfigError where one is in use or named twice."""
    for name, port in ports.items():
        if list(ports.values()).count(port) > 1:
            raise ConfigError(f"port {port} is given twice; choose another with --{name}-port")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                reason = "needs root" if isinstance(error, PermissionError) else "is in use"
                raise ConfigError(f"port {port} {reason}; choose another with --{name}-port") from error


def _run(
    server: TritonServer, prepared: Sequence[PreparedModel], report: Report, started: float, *, verbose: bool
) -> int:
    supervisor = Supervisor(server, report.say)
    copy = LogCopy(server.options.log)
    report.step("starting the server")
    report.detail(f"log {server.options.log}")
    server.start()
    supervisor.install()
    if verbose:
        copy.start()
    try:
        if _wait_ready(server, supervisor, report):
            report.say(f"READY: server and model took {time.monotonic() - started:.1f} s. Ctrl-C drains and ends.")
            _announce(server.options, prepared, supervisor, report)
        return supervisor.run()
    finally:
        server.stop()
        copy.stop()


def _wait_ready(server: TritonServer, supervisor: Supervisor, report: Report) -> bool:
    """False where a signal came first. Raises ServerError."""
    try:
        server.wait_ready(waiting=lambda: report.detail(f"loading {', '.join(server.options.models)}"))
    except ServerError:
        if not supervisor.stopping:
            raise
        return False
    supervisor.models_are_ready()
    report.done(f"log {server.options.log}")
    return True


def _announce(
    options: ServerOptions, prepared: Sequence[PreparedModel], supervisor: Supervisor, report: Report
) -> None:
    for kind, port in (("HTTP", options.http_port), ("gRPC", options.grpc_port), ("metrics", options.metrics_port)):
        report.say(f"  {kind:8}{HOST}:{port}{'/metrics' if kind == 'metrics' else ''}")
    if not prepared:
        return
    try:
        _show_sample(options.http_port, prepared[0], report)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if not supervisor.stopping:
            print(f"\nnereid: the sample failed: {error}", file=sys.stderr, flush=True)


def _show_sample(port: int, model: PreparedModel, report: Report) -> None:
    """Print commands to try, then an answer as it arrives. Raises what `sample.stream_answer` raises."""
    prompt = sample_prompt(model.directory)
    stream = streams(port, model.name)
    report.say(f"Ask it from another terminal{', whole or as a stream' if stream else ''}:\n")
    for streamed in (False, True) if stream else (False,):
        report.say(curl_command(port, model.name, prompt, stream=streamed) + "\n")
    print(f"A sample answer of {model.name}{', as it streams' if stream else ''}:\n> ", end="", flush=True)
    for piece in stream_answer(port, model.name, prompt, stream=stream):
        print(piece, end="", flush=True)
    print(flush=True)
