"""Compiles a Launch for a GPU that is not at hand, and reads from the result what decides its speed.

Always holds: a kernel is specialised by Triton-lang's own code, from the very arguments that the runtime would get, so
that what is measured here is what a GPU runs. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from nereid_kernels.launch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# A buffer of a pipelined loop: allocated once before it, without a value, in as many slots as its first dimension says.
_BUFFER = re.compile(r"ttg\.local_alloc (?:\{[^}]*\} )?: \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?!i64)")
_REGISTERS = re.compile(r"\bREG:(\d+)")
_LOCAL = re.compile(r"\b(?:STL|LDL)(?:\.LU)?(?:\.(64|128))?\b")
_SASS = {
    "wgmma": r"\b[HIQ]GMMA\.",
    "mma": r"\b(?:[HIQO]MMA\.|UTC[HIQO]MMA\b)",
    "async_copies": r"\bLDGSTS\.\S*128\b",
    "tma_loads": r"\bUTMALDG\.",
    "wide_loads": r"\bLDG\.\S*128\b",
}
_AMDGCN = {
    "wgmma": r"(?!)",
    "mma": r"\bv_mfma_",
    "async_copies": r"\b(?:global|buffer)_load_lds_dwordx4\b|\bbuffer_load_dwordx4 .*\blds\b",
    "tma_loads": r"(?!)",
    "wide_loads": r"\b(?:global|buffer)_load_dwordx4\b",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What the compiler made of one launch. Spills count stores and loads; AMD's are 4 bytes a spilled register."""

    registers: int  # a thread
    spill_bytes: int  # a thread; as the code moves them, once through
    shared_bytes: int  # a program
    wgmma: int  # warp-group matrix products in the code (sm_90)
    mma: int  # all other matrix products
    async_copies: int  # asynchronous copies of 16 bytes a thread, global to shared memory
    tma_loads: int  # tiles loaded by TMA
    wide_loads: int  # loads of 16 bytes a thread into registers
    buffers: str  # slots of each buffer of a pipelined loop, such as "2 2"


def compile_launch(launch: Launch, architecture: str) -> Figures:
    """Compile `launch`, whose tensors may lie on the meta device. architecture: one of TARGETS.

    The figures are kept in Triton-lang's own cache, beside the compiled code. Raises what the compiler raises.
    """
    if not hasattr(launch.kernel, "cache_key"):
        raise RuntimeError("TRITON_INTERPRET is set: kernels can only be compiled in a process without it")
    compiled = _compile(launch, TARGETS[architecture])
    reader = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    kept = Path(triton.knobs.cache.dir) / f"figures-{reader}-{compiled.hash}.json"
    if kept.exists():
        return Figures(**json.loads(kept.read_text("utf-8")))
    code = _read_amdgcn(compiled) if architecture.startswith("gfx") else _read_sass(compiled)
    buffers = " ".join(_BUFFER.findall(compiled.asm["ttgir"]))
    figures = Figures(**code, shared_bytes=compiled.metadata.shared, buffers=buffers)
    kept.write_text(json.dumps(asdict(figures)), "utf-8")
    return figures


def specialisation(launch: Launch, architecture: str) -> str:
    """By what the runtime finds the compiled code of this launch: two launches of a kernel that differ in it are
    compiled one by one."""
    _, specialised, options = _bind(launch, TARGETS[architecture])
    return str((launch.name, specialised, sorted(options.items())))


def _bind(launch: Launch, target: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(arguments, what the code depends on of them, options), by the runtime's own code."""
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
    return bind(**launch.arguments, num_warps=launch.num_warps, num_stages=launch.num_stages)  # type: ignore[no-any-return]


def _compile(launch: Launch, target: Any) -> Any:
    """The steps of JITFunction.run up to the compiler, with `target` in the place of the GPU at hand."""
    kernel, (bound, specialised, options) = launch.kernel, _bind(launch, target)
    everything = {**launch.arguments, **options}
    options, signature, constexprs, attributes = kernel._pack_args(
        make_backend(target), everything, bound, specialised, options
    )
    return triton.compile(ASTSource(kernel, signature, constexprs, attributes), target=target, options=options.__dict__)


def _read_sass(compiled: Any) -> dict[str, int]:
    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(tools.cuobjdump.path, "--dump-resource-usage", str(cubin))
        sass = _run(tools.nvdisasm.path, "-c", str(cubin))
    found = _REGISTERS.search(usage)
    assert found is not None, usage
    # Local memory holds nothing but spilled registers in a Triton-lang kernel.
    spilled = sum(int(bits or 32) // 8 for bits in _LOCAL.findall(sass))
    return {"registers": int(found[1]), "spill_bytes": spilled, **_count(_SASS, sass)}


def _read_amdgcn(compiled: Any) -> dict[str, int]:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    return {
        "registers": field("vgpr_count"),
        "spill_bytes": 4 * (field("vgpr_spill_count") + field("sgpr_spill_count")),
        **_count(_AMDGCN, text),
    }


def _count(patterns: dict[str, str], text: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, text, re.MULTILINE)) for name, pattern in patterns.items()}


def _run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout
