"""The command line: `serve`, `test`, `check`. Owns the reading of arguments; each command has a module of its own.

Always holds: an error that Nereid raises on purpose ends the command with one line on stderr and exit status 1;
wrong arguments with status 2; an interrupt with status 130, SIGTERM with 143.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nereid.errors import NereidError


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
    from nereid.cli.serve import ServeOptions, serve

    return serve(
        ServeOptions(
            repository=options.model_repository,
            models=tuple(options.model),
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            log_verbose=options.log_verbose,
            extra=tuple(given[split + 1 :]),
        )
    )


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
    commands.add_parser("test", help="run the tests; every further argument is pytest's")
    commands.add_parser("check", help="run ruff and mypy over the sources")
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)
