"""`nereid bench server`: what serving costs: a real server under perf_analyzer, beside its engine alone.

Always holds: both get the same requests in pairs, one right after the other, so that only one of them computes; server
and client share the processor; all processes are ended on every path.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereid.bench import pairs, threads
from nereid.bench.contestants import deployed
from nereid.bench.measures import measure
from nereid.bench.pairs import Pair
from nereid.bench.prompts import PromptSource
from nereid.bench.quiet import wait_until_quiet
from nereid.bench.records import circumstances, write_rows
from nereid.bench.worker_process import Worker
from nereid.bench.workloads import PROFILED, WARM_UP, Workload, streams
from nereid.cli.provision import provision_server
from nereid.cli.repository import prepare_models
from nereid.cli.server_process import HOST, ServerOptions, TritonServer
from nereid.config import SETTINGS_FILE
from nereid.errors import ServerError
from nereid.paths import Progress, cache_dir
from nereid.processes import free_ports, kill_session, tie_to_parent

_MODEL = "smollm2"
_LOAD_LIMIT_S = 600
_FILES_TIMEOUT_S = 300.0
_PROFILE_S = 6
_UNTIL_IT_DECODES_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServerOptions:
    """The command's arguments. streams: how many requests at once, one after the other."""

    rounds: int
    streams: tuple[int, ...]
    csv: Path | None
    profile: bool


def bench_server(options: BenchServerOptions, checkout: Path, say: Progress) -> int:
    """Measure, and print the tables. Returns 1 where a goal is missed. Raises NereidError and OSError."""
    repository = checkout / "model_repository"
    (model,) = prepare_models(repository, [_MODEL], say)
    source = PromptSource.of_project(checkout, model.directory)
    program = deployed(repository / _MODEL / "1" / SETTINGS_FILE, model.directory).program(say)
    with _started(repository, say):
        say("the server was ready once; the next start is a warm one")
    with _started(repository, say) as (server, ready_s), Worker(program) as worker:
        client = PerfAnalyzer(checkout, server)
        worker.ask(WARM_UP, source.prompts(WARM_UP))
        client.drive(WARM_UP, source.prompts(WARM_UP))
        done = _measure(options, worker, client, source, say)
        profile = _profile(server, client, source, say) if options.profile else ""
    if options.csv:
        write_rows(options.csv, [asdict(pair) for pair in done], circumstances(checkout))
    found = pairs.findings(done, ready_s)
    print("\n".join(["", str(circumstances(checkout)), "", pairs.describe(done, found), profile]))
    return 0 if all(each.met for each in found) else 1


@contextmanager
def _started(repository: Path, say: Progress) -> Iterator[tuple[TritonServer, float]]:
    """A ready server, and how many seconds it took."""
    http_port, grpc_port, metrics_port = free_ports(HOST, 3)
    options = ServerOptions(
        tree=provision_server(say),
        repository=repository,
        models=(_MODEL,),
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log=cache_dir() / "logs" / "bench-tritonserver.log",
    )
    started = time.monotonic()
    with TritonServer(options) as server:
        server.wait_ready()
        yield server, time.monotonic() - started


def _measure(
    options: BenchServerOptions, worker: Worker, client: PerfAnalyzer, source: PromptSource, say: Progress
) -> list[Pair]:
    done = []
    for number in range(1, options.rounds + 1):
        for count in options.streams:
            workload = streams(count)
            prompts = source.prompts(workload)
            wait_until_quiet()
            reply = worker.ask(workload, prompts)
            alone, served = measure(workload, reply.answers), client.drive(workload, prompts)
            done.append(
                Pair(
                    round=number,
                    streams=count,
                    engine_rate=alone.output_rate,
                    server_rate=served["output_tokens"] / served["duration_s"],
                    engine_ttft=alone.ttft,
                    server_ttft=statistics.median(served["ttft"]) / 1e3,
                    lone=served["lone_tokens"] / served["output_tokens"],
                    taken=reply.taken,
                )
            )
            rates = f"engine {done[-1].engine_rate:.1f}, server {done[-1].server_rate:.1f} tokens/s"
            say(f"round {number}: {count} streams, {rates}")
    return done


class PerfAnalyzer:
    """Drives a server by gRPC streams, as client_examples/load/perf_analyzer.sh does."""

    def __init__(self, checkout: Path, server: TritonServer) -> None:
        self._load_tools = checkout / "client_examples" / "load"
        self._server = server

    def drive(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        """All requests of `workload` at once. Returns the values of figures.py. Raises ServerError."""
        with tempfile.TemporaryDirectory(prefix="nereid-bench-") as folder:
            shown = {"stream": [True], "return_num_output_tokens": [True]}
            requests = [{"input_ids": {"content": list(p), "shape": [len(p)]}, **shown} for p in prompts]
            data = Path(folder) / "requests.json"
            data.write_text(json.dumps({"data": requests}), "utf-8")
            self._run(workload, data, Path(folder))
            (level,) = self._figures(Path(folder) / "profile_export.json")
        if level["output_tokens"] != sum(a.num_output_tokens for a in workload.arrivals):
            raise ServerError(
                f"{level['output_tokens']} tokens came for {workload.name}, and not all that were asked for"
            )
        return dict(level)

    def _run(self, workload: Workload, data: Path, folder: Path) -> None:
        count = len(workload.arrivals)
        settings = {
            "CONCURRENCY": count,
            "REQUESTS": count,
            "OUTPUT_TOKENS": workload.arrivals[0].num_output_tokens,
            "INPUT_DATA": data,
            "RESULTS": folder,
            "LIMIT_S": _LOAD_LIMIT_S,
        }
        address = f"{HOST}:{self._server.options.grpc_port}"
        command = [str(self._load_tools / "perf_analyzer.sh"), address, _MODEL]
        more = ["--request-parameter", "temperature:0:int", "--request-parameter", "cache:false:bool"]
        child = subprocess.Popen(
            [*command, *more],
            env={**os.environ, **{name: str(value) for name, value in settings.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=tie_to_parent(),
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(timeout=_LOAD_LIMIT_S + _FILES_TIMEOUT_S)
        finally:
            kill_session(child.pid)
            child.wait()
        if child.returncode != 0:
            raise ServerError(f"perf_analyzer failed: {said.strip()[-500:]}")

    def _figures(self, export: Path) -> Any:
        command = [sys.executable, str(self._load_tools / "figures.py"), "--json", str(export)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _profile(server: TritonServer, client: PerfAnalyzer, source: PromptSource, say: Progress) -> str:
    """The threads of the model's process while 16 streams decode."""
    say("profiling")
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(client.drive, PROFILED, source.prompts(PROFILED))
        time.sleep(_UNTIL_IT_DECODES_S)
        found = threads.profile(server.stubs()[_MODEL], _PROFILE_S, say)
        done.result()
    return f"\n{PROFILED.name}: where the time of {_PROFILE_S} s went in the model's process\n{threads.describe(found)}"
