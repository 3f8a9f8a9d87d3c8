"""Program: a model's operations, recorded once when it is loaded, and run all together in each step.

Owns the memory of what the operations hand on, as wide as the largest step needs it: nothing is allocated in a step. As
with a captured CUDA graph, addresses are fixed and the numbers of rows are not: they stand in the step. A buffer's
memory serves another one once nobody holds it, in the order of recording, in which the operations run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from nereid_kernels.native import library as native
from nereid_kernels.native.packing import PackedWeight, QuantisedWeight

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}
_CODES = {8: 2, 4: 3}  # Dtype's INT8 and INT4, by bits


class Rows(IntEnum):
    """What a buffer has a row for: each token of the step, or each hidden state that is wanted."""

    TOKENS = 0
    HIDDEN_ROWS = 1


class Buffer:
    """What an operation hands on. memory: [most rows, width]."""

    def __init__(self, rows: Rows, memory: Tensor) -> None:
        self.rows = rows
        self.memory = memory

    @property
    def width(self) -> int:
        return self.memory.shape[1]

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's part of the paged cache, as in `nereid_kernels.paged_attention`. k, v: [block, kv_head, slot,
    head_dim].  k_scale, v_scale: [block, kv_head, slot], or None.  group: index into a step's groups."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    group: int = 0
    window: int = 0
    num_sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What differs from step to step, all contiguous.

    token_ids, positions: [tokens] int64.  hidden_rows: [rows] int64.  cu_query_lens: [sequences + 1] int32.  seq_lens:
    [sequences] int32.  groups: (slot_mapping [tokens] int64, block_tables [sequences, max blocks] int32).
    """

    token_ids: Tensor
    positions: Tensor
    hidden_rows: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    groups: Sequence[tuple[Tensor, Tensor]]


class Program:
    """Operations in order. Recording methods return what the operation will hand on."""

    def __init__(self, library: native.Library, dtype: torch.dtype, max_tokens: int, max_hidden_rows: int) -> None:
        """dtype: float32 or bfloat16, of what is handed on.  max_tokens, max_hidden_rows: of a step."""
        self._library = library
        self._dtype = dtype
        self._most = {Rows.TOKENS: max_tokens, Rows.HIDDEN_ROWS: max_hidden_rows}
        self._free: dict[tuple[Rows, int, torch.dtype], list[Tensor]] = {}
        self._arguments: list[native.Arguments] = []
        self._kept: list[object] = []  # tensors whose addresses the operations have
        self._operations: ctypes.Array[native.Operation] = (native.Operation * 0)()
        self._attention: dict[tuple[int, ...], native.PagedAttention] = {}  # one for each need of scratch
        self._scratch = torch.empty(0)

    # ---- recording

    def input(self, rows: Rows, width: int) -> Buffer:
        """A buffer that is filled from outside before each run."""
        return self._buffer(rows, width, self._dtype)

    def take_rows(self, source: Tensor) -> Buffer:
        """The rows of an embedding table [vocabulary, width] by the step's tokens."""
        target = self._buffer(Rows.TOKENS, source.shape[1], source.dtype)
        self._record_rows(self._address(source), target)
        return target

    def hidden_rows(self, source: Buffer) -> Buffer:
        """Those rows of a buffer that the step asks for."""
        target = self._buffer(Rows.HIDDEN_ROWS, source.width, source.memory.dtype)
        self._record_rows(source.address, target)
        return target

    def _record_rows(self, source: int, target: Buffer) -> None:
        row_bytes = target.width * target.memory.element_size()
        self._record("take_rows", native.TakeRows(source, target.address, row_bytes, target.rows))

    def rms_norm(self, x: Buffer, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Buffer:
        """See `nereid_kernels.rms_norm`."""
        y = self._buffer(x.rows, x.width, self._dtype)
        self._record_norm(x, None, weight, None, y, eps, weight_offset)
        return y

    def add_rms_norm(
        self, x: Buffer, residual: Buffer, weight: Tensor, eps: float, *, weight_offset: float = 0.0
    ) -> tuple[Buffer, Buffer]:
        """See `nereid_kernels.rms_norm`."""
        y, total = (self._buffer(x.rows, x.width, self._dtype) for _ in range(2))
        self._record_norm(x, residual, weight, total, y, eps, weight_offset)
        return y, total

    def _record_norm(
        self, x: Buffer, residual: Buffer | None, weight: Tensor, total: Buffer | None, y: Buffer, eps: float,
        weight_offset: float,
    ) -> None:  # fmt: skip
        arguments = native.RmsNorm(
            x.address, residual and residual.address, self._address(weight.float()), total and total.address,
            y.address, x.width, eps, weight_offset, x.rows, _DTYPES[self._dtype],
        )  # fmt: skip
        self._record("rms_norm", arguments)

    def matmul(
        self, x: Buffer, weight: PackedWeight | QuantisedWeight, bias: Tensor | None = None, *, wide: bool = False
    ) -> Buffer:
        """x times weight transposed, and bias [out] added. wide: in float32.  A gated weight: silu(gate) * up."""
        width = weight.out_features // 2 if weight.gated else weight.out_features
        y = self._buffer(x.rows, width, torch.float32 if wide else self._dtype)
        added = None if bias is None else self._address(bias.float())
        output = native.Output(y.address, added, width, weight.out_features, weight.gated, wide)
        sizes, dtype = (x.width, weight.in_features), _DTYPES[self._dtype]
        if isinstance(weight, QuantisedWeight):
            codes, scales = self._address(weight.codes), self._address(weight.scales)
            format_ = _CODES[weight.bits]
            arguments = native.QuantisedMatmul(
                x.address, codes, scales, output, *sizes, weight.group, x.rows, dtype, format_
            )
            self._record("quantised_matmul", arguments)
        else:
            self._record("matmul", native.Matmul(x.address, self._address(weight.data), output, *sizes, x.rows, dtype))
        return y

    def rotary_kv_write(self, qkv: Buffer, cos_sin: Tensor, cache: LayerKV) -> None:
        """Turn queries and keys in place, and store keys and values; see `nereid_kernels.qk_norm_rope_kv_write`.

        qkv: of width (heads + 2 * kv_heads) * head_dim.  cos_sin: [positions, 2, rotary_dim] float32, of all positions.
        """
        place = self._place(cache)
        heads = qkv.width // place.head_dim - 2 * place.kv_heads
        arguments = native.RotaryKVWrite(
            place, qkv.address, self._address(cos_sin), heads, cos_sin.shape[2], _DTYPES[self._dtype]
        )
        self._record("rotary_kv_write", arguments)

    def paged_attention(
        self,
        query: Buffer,
        heads: int,
        cache: LayerKV,
        scale: float,
        *,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Buffer:
        """Of width heads * head_dim. query: the first so many columns are queries. See
        `nereid_kernels.paged_attention`; rows have the same bits whatever is beside them."""
        place = self._place(cache)
        out = self._buffer(query.rows, heads * place.head_dim, self._dtype)
        by_head = [None if x is None else self._address(x.float()) for x in (sinks, alibi_slopes)]
        arguments = native.PagedAttention(
            place, query.address, out.address, *by_head, query.width, heads, cache.window, cache.num_sink_tokens,
            scale, soft_cap, _DTYPES[self._dtype],
        )  # fmt: skip
        self._attention[heads, place.kv_heads, place.head_dim] = arguments
        self._record("paged_attention", arguments)
        return out

    def _place(self, cache: LayerKV) -> native.Cache:
        k = cache.k
        self._kept += [cache]
        scales = [None if x is None else x.data_ptr() for x in (cache.k_scale, cache.v_scale)]
        scale_stride = 0 if cache.k_scale is None else cache.k_scale.stride(0)
        return native.Cache(
            k.data_ptr(), cache.v.data_ptr(), *scales, k.shape[1], k.shape[3], k.shape[2], k.stride(0), scale_stride,
            cache.group, _FORMATS.get(k.dtype, 0),
        )  # fmt: skip

    def _buffer(self, rows: Rows, width: int, dtype: torch.dtype) -> Buffer:
        free = self._free.setdefault((rows, width, dtype), [])
        memory = free.pop() if free else torch.zeros(self._most[rows], width, dtype=dtype)
        buffer = Buffer(rows, memory)
        self._kept.append(memory)
        weakref.finalize(buffer, free.append, memory)
        return buffer

    def _address(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _record(self, operation: str, arguments: native.Arguments) -> None:
        self._arguments.append(arguments)
        entry = native.Operation(self._library.address_of(operation), ctypes.addressof(arguments))
        self._operations = (native.Operation * len(self._arguments))(*self._operations, entry)

    # ---- running

    def run_on(self, x: Buffer, rows: Tensor) -> None:
        """Carry out a program of operations on hidden rows alone, of which `x` is the input.

        rows: [rows, width] of x's dtype, contiguous, at most as many as it has. Raises ValueError where it is not that.
        """
        memory = x.memory
        fits = len(rows) <= len(memory) and rows.shape[1] == x.width and rows.dtype == memory.dtype
        if not fits or not rows.is_contiguous():
            raise ValueError(f"rows: got {rows.dtype} {list(rows.shape)}; allowed: {memory.dtype} {list(memory.shape)}")
        ctypes.memmove(x.address, rows.data_ptr(), rows.nbytes)  # a tensor's copy_ takes four times as long
        step = native.Step(num_hidden_rows=len(rows))
        self._library.run(self._operations, step, torch.get_num_threads())

    def run(self, arrays: StepArrays) -> None:
        """Carry out all operations for one step."""
        groups = (native.Group * len(arrays.groups))(
            *(native.Group(slots.data_ptr(), tables.data_ptr(), tables.shape[1]) for slots, tables in arrays.groups)
        )
        step = native.Step(
            len(arrays.token_ids), len(arrays.hidden_rows), len(arrays.seq_lens), arrays.token_ids.data_ptr(),
            arrays.positions.data_ptr(), arrays.hidden_rows.data_ptr(), arrays.cu_query_lens.data_ptr(),
            arrays.seq_lens.data_ptr(), ctypes.addressof(groups), None,
        )  # fmt: skip
        need = max((self._library.attention_scratch(a, step) for a in self._attention.values()), default=0)
        if need > len(self._scratch):
            self._scratch = torch.empty(need)
        step.scratch = self._scratch.data_ptr()
        self._library.run(self._operations, step, torch.get_num_threads())
