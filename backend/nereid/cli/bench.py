"""`nereid bench`: reads the arguments of its three benchmarks, and runs one.

Always holds: a benchmark that is ended by a signal leaves through every `finally`, so that no engine outlives it.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from nereid.cli.checks import project_root
from nereid.config import QUANTIZATIONS
from nereid.errors import ConfigError


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Describe the command's arguments to its parser."""
    kinds = bench.add_subparsers(required=True)
    peers = kinds.add_parser("peers", help="Nereid's engine and others on the same requests, in turn")
    _add_rounds(peers)
    peers.add_argument("--engines", type=_names, default=(), metavar="A,B", help="default: nereid,vllm,openvino")
    _add_workloads(peers)
    peers.add_argument("--trace", type=Path, metavar="FILE", help="Azure's trace of conversations, for the replay")
    peers.set_defaults(run=_peers)
    engine = kinds.add_parser("engine", help="Nereid's engine alone, against what the machine could do")
    _add_rounds(engine)
    engine.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="default: %(default)s")
    _add_workloads(engine)
    _add_profile(engine)
    engine.set_defaults(run=_engine)
    server = kinds.add_parser("server", help="a real server, driven by perf_analyzer, beside its engine alone")
    _add_rounds(server)
    server.add_argument("--streams", type=_counts, default=(1, 16), metavar="N,M", help="default: 1,16")
    _add_profile(server)
    server.set_defaults(run=_server)


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write each run as a line")


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", type=_names, default=(), metavar="A,B", help="default: all")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", action="store_true", help="say where the time goes, by thread (py-spy)")


def _peers(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from nereid.bench.peers import PeersOptions, bench_peers

    _begin("peers", extra)
    return bench_peers(
        PeersOptions(
            rounds=options.rounds,
            engines=options.engines,
            workloads=options.workloads,
            csv=options.csv,
            trace=options.trace,
        ),
        project_root(),
        _say,
    )


def _engine(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from nereid.bench.engine_alone import EngineOptions, bench_engine

    _begin("engine", extra)
    return bench_engine(
        EngineOptions(
            rounds=options.rounds,
            quantization=options.quantization,
            workloads=options.workloads,
            csv=options.csv,
            profile=options.profile,
        ),
        project_root(),
        _say,
    )


def _server(options: argparse.Namespace, extra: Sequence[str]) -> int:
    from nereid.cli.bench_server import BenchServerOptions, bench_server

    _begin("server", extra)
    return bench_server(
        BenchServerOptions(rounds=options.rounds, streams=options.streams, csv=options.csv, profile=options.profile),
        project_root(),
        _say,
    )


def _begin(kind: str, extra: Sequence[str]) -> None:
    if extra:
        raise ConfigError(f"bench {kind} takes nothing after --; got {' '.join(extra)}")
    signal.signal(signal.SIGTERM, _exit_on_sigterm)


def _say(text: str) -> None:
    print(text, flush=True)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names with commas between them")
    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, _names(text)))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return int(text)
