"""The command line: `serve`, `gateway`, `bench`, `test`, `check`. Owns the reading of arguments; each command has a
module of its own.

Always holds: an error that Nereid raises on purpose ends the command with one line on stderr and exit status 1;
wrong arguments with status 2; an interrupt with status 130, SIGTERM with 143.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nereid.cli.bench import add_bench
from nereid.errors import ConfigError, NereidError

_KEY_VARIABLE = "NEREID_API_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except NereidError as error:
        print(f"nereid: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"nereid: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(given: list[str]) -> int:
    if given[:1] == ["test"]:  # every further argument is pytest's, also --help
        from nereid.cli.checks import run_tests

        return run_tests(given[1:])
    if given[:1] == ["check"] and not {"-h", "--help"} & set(given):
        from nereid.cli.checks import run_checks

        return run_checks(given[1:])
    if given in ([], ["help"]):
        given = ["--help"]
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    run: Callable[[argparse.Namespace, Sequence[str]], int] = options.run
    return run(options, given[split + 1 :])


def _serve(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from nereid.cli.serve import ServeOptions, serve

    return serve(
        ServeOptions(
            repository=options.model_repository,
            models=tuple(options.model),
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            log_verbose=options.log_verbose,
            extra=tuple(extra),
        )
    )


def _gateway(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from nereid.gateway.app import GatewaySettings
    from nereid.gateway.serve import GatewayOptions, serve_gateway
    from nereid.gateway.tool_format import ToolFormat

    if extra:
        raise ConfigError(f"gateway takes nothing after --; got {' '.join(extra)}")
    keys = _keys(options.api_key, os.environ.get(_KEY_VARIABLE))
    settings = GatewaySettings(triton=options.grpc, keys=keys, tool_format=ToolFormat(options.tool_format))
    return serve_gateway(GatewayOptions(host=options.host, port=options.port, settings=settings))


def _keys(given: Sequence[str], variable: str | None) -> tuple[str, ...]:
    """The keys to let in: those `given`, else that of the environment's `variable`; none: everybody is let in.

    Raises ConfigError where the variable holds no key: a script that meant to close the gateway must not open it.
    """
    if given or variable is None:
        return tuple(given)
    try:
        return (_key(variable),)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{_KEY_VARIABLE}: {error} (unset it to let in everybody)") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nereid", description="Serve language models in Triton Inference Server.")
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser(
        "serve",
        help="start the server on this machine and stay in the foreground",
        epilog="What follows `--` is given to tritonserver as it is.",
    )
    serve.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the project's own")
    which = "a model to load; may be repeated (default: all of a given DIR, smollm2 of the project's own)"
    serve.add_argument("--model", action="append", default=[], metavar="NAME", help=which)
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        serve.add_argument(f"--{name}-port", type=_port, default=port, metavar="N", help=f"default: {port}")
    serve.add_argument("--log-verbose", action="store_true", help="show the server's log here, too")
    serve.set_defaults(run=_serve)
    _add_gateway(commands.add_parser("gateway", help="start the OpenAI-compatible gateway in front of a server"))
    add_bench(commands.add_parser("bench", help="measure the engine, the server, and other engines beside them"))
    commands.add_parser("test", help="run the tests; every further argument is pytest's")
    commands.add_parser("check", help="run ruff and mypy over the sources")
    return parser


def _add_gateway(gateway: argparse.ArgumentParser) -> None:
    gateway.add_argument(
        "--grpc",
        type=_address,
        default="127.0.0.1:8001",
        metavar="HOST:PORT",
        help="the server's gRPC endpoint (default: %(default)s)",
    )
    gateway.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    gateway.add_argument("--port", type=_port, default=9000, metavar="N", help="default: %(default)s")
    which = f"let in only clients with this key; may be repeated (default: ${_KEY_VARIABLE}, which no other user sees)"
    gateway.add_argument("--api-key", type=_key, action="append", default=[], metavar="KEY", help=which)
    gateway.add_argument(
        "--tool-format",
        choices=("auto", "hermes", "llama"),
        default="auto",
        help="how the models write calls of tools (default: auto, which reads both and forces hermes)",
    )
    gateway.set_defaults(run=_gateway)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", " ")
    if not colon or not bare or re.search(r"[\s/@]", bare):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as 127.0.0.1:8001 or [::1]:8001 are")
    return f"{host}:{_port(port)}"


def _key(text: str) -> str:
    """A message must not show a key."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty key; allowed: at least one character")
    if text != text.strip():
        raise argparse.ArgumentTypeError("got a key with white space around it; allowed: none, for HTTP drops it")
    return text
