"""`python -m nereid.bench.ceilings`: what this machine can do at most, measured: prints JSON, bytes and operations a
second.

Always holds: all cores take part, and the best of several tries counts, so that what else runs lowers a ceiling least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from nereid.bench.floors import Machine
from nereid.bench.quiet import wait_until_quiet
from nereid.errors import NereidError

_BUFFER_BYTES = 1 << 29  # many times any processor's cache
_ROW = 4096  # numbers
_SIDE = 2048  # of the square matrices
_TRIES = 7
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """read: bytes a second.  float32, bfloat16: operations a second of matrix products by torch."""

    read: float
    float32: float
    bfloat16: float

    @property
    def machine(self) -> Machine:
        """Its arithmetic bound is the better of the two: any engine may compute bfloat16 weights in float32."""
        return Machine(self.read, max(self.float32, self.bfloat16))


def measure_ceilings() -> Ceilings:
    """In a process of its own, which leaves no threads and no memory behind; once others take little of the processor,
    if they soon do. Raises NereidError."""
    wait_until_quiet()
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "GOMP_SPINCOUNT": "5000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NereidError(f"the machine's ceilings could not be measured: {done.stderr.strip()[-500:]}")
    return Ceilings(**json.loads(done.stdout))


def _best_s(act: Callable[[], object]) -> float:
    """Seconds of the fastest of several tries, after one that is not counted."""
    act()
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)


def _measured() -> Ceilings:
    import torch

    buffer = torch.ones(_BUFFER_BYTES // 4)
    rows, vector = buffer.view(-1, _ROW), torch.ones(_ROW)
    # Several ways to read it all: which of them gets most out of the memory differs from processor to processor.
    ways: tuple[Callable[[], object], ...] = (buffer.sum, lambda: rows.sum(1), lambda: rows @ vector)
    read_s = min(map(_best_s, ways))

    def product(dtype: torch.dtype) -> float:
        a, b = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
        return float(2 * _SIDE**3 / _best_s(lambda: a @ b))

    return Ceilings(_BUFFER_BYTES / read_s, product(torch.float32), product(torch.bfloat16))


if __name__ == "__main__":
    print(json.dumps(asdict(_measured())))
