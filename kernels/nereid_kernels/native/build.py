"""Compiling the native library, once for each kind of processor and set of sources.

Owns nothing that is loaded: it fills a folder with the shared library of one variant. Needs a g++ (12 or later) with
OpenMP; no headers of torch's or Python's.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
# OpenMP is torch's own copy at run time: the name of the library is the same, and torch's is loaded first. So there is
# one pool of threads in the process, not two that wait for the same processors.
# What is unrolled only late stays in memory, and loops over a product's rows and registers are larger than the default
# allows.
_FLAGS = (
    "-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-Wall", "-Wextra",
    "--param=max-completely-peeled-insns=400",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled for one kind of processor."""

    name: str
    flags: tuple[str, ...]


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
_VARIANTS = {
    "x86_64": (
        Variant("amx", (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
        Variant("avx512_bf16", (*_AVX512, "-mavx512vnni", "-mavx512bf16")),
        Variant("avx512", _AVX512),
        Variant("avx2", ("-mavx2", "-mfma")),
        Variant("sse2", ()),  # any processor of the type; by four lanes, as NEON
    ),
    "aarch64": (Variant("neon", ()),),
}


class BuildError(Exception):
    """There is no compiler that can do it; the message is the compiler's last words, or says what is missing."""


def variants() -> tuple[Variant, ...]:
    """Those of this type of machine, the best first; none where it is not known."""
    return _VARIANTS.get(platform.machine(), ())


def compiler() -> str | None:
    """The path of g++, where there is one."""
    return shutil.which("g++")


def key(variant: Variant) -> str:
    """Names a build: its sources, flags and type of machine. What was built is used without a compiler too."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, variant)).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(variant: Variant, folder: Path) -> None:
    """Fill an empty folder with NAME.so. Takes some 15 s on two cores. Raises BuildError."""
    found = compiler()
    if found is None:
        raise BuildError("no g++ was found (apt install g++)")
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)  # the longest begin first
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda source: _compile(found, variant, source, folder), sources))
    objects = [folder / f"{source.stem}.o" for source in sources]
    _run([found, "-shared", "-fopenmp", *map(str, objects), "-o", str(folder / f"{variant.name}.so")])
    for path in objects:
        path.unlink()


def _compile(found: str, variant: Variant, source: Path, folder: Path) -> None:
    target = folder / f"{source.stem}.o"
    _run([found, *_FLAGS, *variant.flags, "-c", str(source), "-o", str(target)])


def _run(command: Iterable[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr.strip()[-2000:] or f"g++ ended with {done.returncode}")
