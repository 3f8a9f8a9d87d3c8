"""The native library in the process: which variant fits the processor, and its functions with their types.

Owns the open library. Structures here have the fields of those in csrc/, in their order.
"""

from __future__ import annotations

import ctypes
import platform
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

_OPERATIONS = ("matmul", "quantised_matmul", "rms_norm", "take_rows", "rotary_kv_write", "paged_attention")


class Group(Structure):
    _fields_ = [("slot_mapping", c_void_p), ("block_tables", c_void_p), ("max_blocks", c_int64)]


class Step(Structure):
    _fields_ = [
        ("num_tokens", c_int64), ("num_hidden_rows", c_int64), ("num_sequences", c_int64), ("token_ids", c_void_p),
        ("positions", c_void_p), ("hidden_rows", c_void_p), ("cu_query_lens", c_void_p), ("seq_lens", c_void_p),
        ("groups", c_void_p), ("scratch", c_void_p),
    ]  # fmt: skip


class Operation(Structure):
    _fields_ = [("run", c_void_p), ("arguments", c_void_p)]


class Cache(Structure):
    _fields_ = [
        ("k", c_void_p), ("v", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p), ("kv_heads", c_int64),
        ("head_dim", c_int64), ("block_size", c_int64), ("block_stride", c_int64), ("scale_stride", c_int64),
        ("group", c_int32), ("format", c_int32),
    ]  # fmt: skip


class Output(Structure):
    _fields_ = [
        ("y", c_void_p), ("bias", c_void_p), ("y_stride", c_int64), ("out_features", c_int64), ("epilogue", c_int32),
        ("wide", c_int32),
    ]  # fmt: skip


class Matmul(Structure):
    _fields_ = [
        ("x", c_void_p), ("weight", c_void_p), ("output", Output), ("x_stride", c_int64), ("in_features", c_int64),
        ("rows", c_int32), ("dtype", c_int32),
    ]  # fmt: skip


class QuantisedMatmul(Structure):
    _fields_ = [
        ("x", c_void_p), ("codes", c_void_p), ("scales", c_void_p), ("output", Output), ("x_stride", c_int64),
        ("in_features", c_int64), ("group", c_int64), ("rows", c_int32), ("dtype", c_int32), ("format", c_int32),
    ]  # fmt: skip


class RmsNorm(Structure):
    _fields_ = [
        ("x", c_void_p), ("residual", c_void_p), ("weight", c_void_p), ("sum", c_void_p), ("y", c_void_p),
        ("width", c_int64), ("eps", c_float), ("weight_offset", c_float), ("rows", c_int32), ("dtype", c_int32),
    ]  # fmt: skip


class TakeRows(Structure):
    _fields_ = [("source", c_void_p), ("target", c_void_p), ("row_bytes", c_int64), ("which", c_int32)]


class RotaryKVWrite(Structure):
    _fields_ = [
        ("cache", Cache), ("qkv", c_void_p), ("cos_sin", c_void_p), ("heads", c_int64), ("rotary_dim", c_int64),
        ("dtype", c_int32),
    ]  # fmt: skip


class PagedAttention(Structure):
    _fields_ = [
        ("cache", Cache), ("query", c_void_p), ("out", c_void_p), ("sinks", c_void_p), ("alibi_slopes", c_void_p),
        ("query_stride", c_int64), ("heads", c_int64),
        ("window", c_int64), ("num_sink_tokens", c_int64), ("scale", c_float), ("soft_cap", c_float),
        ("dtype", c_int32),
    ]  # fmt: skip


Arguments = Matmul | QuantisedMatmul | RmsNorm | TakeRows | RotaryKVWrite | PagedAttention


def fitting_variant() -> str | None:
    """The best variant that this processor can run; None: there is none for its type."""
    if platform.machine() != "x86_64":
        return "neon" if platform.machine() == "aarch64" else None
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return _fitting_avx512()
    return "avx2" if capability == "AVX2" else "sse2"


def _fitting_avx512() -> str:
    has = torch.cpu.get_capabilities()
    if has.get("amx_bf16", False) and torch.cpu._init_amx():  # asks the system that the process may use them
        return "amx"
    # Intel's product of bfloat16 pairs takes as long as four of float32, which make twice as many products.
    pairs_pay = has.get("avx512_bf16", False) and not str(has.get("cpu_name", "")).startswith("Intel")
    return "avx512_bf16" if pairs_pay else "avx512"


class Library:
    """One variant, loaded."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be loaded."""
        self.variant = path.stem
        self._handle = ctypes.CDLL(str(path))
        self._handle.nereid_run.argtypes = (POINTER(Operation), c_int64, POINTER(Step), c_int)
        self._handle.nereid_run.restype = None
        self._handle.nereid_attention_scratch.argtypes = (c_void_p, POINTER(Step))
        self._handle.nereid_attention_scratch.restype = c_int64
        self.tile: int = self._handle.nereid_tile()
        """Columns of a packed weight's tile."""

    def address_of(self, operation: str) -> int:
        """Of one of the operations that a program is made of."""
        assert operation in _OPERATIONS, operation
        address = ctypes.cast(getattr(self._handle, f"nereid_{operation}"), c_void_p).value
        assert address is not None
        return address

    def run(self, operations: ctypes.Array[Operation], step: Step, num_threads: int) -> None:
        """Carry out a program; the lock of the interpreter is free meanwhile."""
        self._handle.nereid_run(operations, len(operations), step, num_threads)

    def attention_scratch(self, arguments: PagedAttention, step: Step) -> int:
        """Floats of scratch that a layer with such arguments needs in a step."""
        size: int = self._handle.nereid_attention_scratch(ctypes.addressof(arguments), step)
        return size
