"""Makes Triton-lang's CPU interpreter right for fp16, bf16 and fp8, whose bit patterns it often takes for integers.

What always holds after `install()`: a narrow value becomes fp32 exactly, is computed with in fp32 and is rounded once,
to nearest even, as compiled code does. Conversions are torch's, but a float that becomes fp8 saturates at the largest
finite value, infinities too, and NaN stays NaN: that is PTX's `cvt.rn.satfinite`, to which Triton-lang compiles it.
A sum over a narrow type is rounded at each step of a tree, since compiled code adds in that type, in an order that
depends on the layout. Other fp8 types than e4m3fn and e5m2 raise an error. Works with triton 3.6 and 3.9.

This module owns all changes to the interpreter's internals; it makes them in place, for the whole process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
# What is replaced, with the first parameters it must have: another triton may have moved or changed it.
_EXPECTED = {
    "": {"_convert_float": "input input_dtype output_dtype rounding_mode"},
    "InterpreterBuilder": {
        "cast_impl": "self src dst_type",
        "binary_op": "self lhs rhs op",
        "unary_op": "self arg op",
        "create_minnumf": "self lhs rhs",
        "create_maxnumf": "self lhs rhs",
        "create_clampf": "self arg lo hi propagate_nans",
        "create_fma": "self x y z",
        "create_dot": "self a b d input_precision max_num_imprecise_acc",
        "create_descriptor_load": "self desc indices",
    },
    "ReduceOps": {"sum": "self input", "min_max": "self input"},
    "ScanOps": {"cumsum": "self input", "cumprod": "self input", "generic_scan": "self input"},
}


def install() -> None:
    """Mend the interpreter. Raises RuntimeError where it is off, or is not the one this module knows."""
    # triton's own library is made of jit functions: they show whether the interpreter was on when it was imported.
    if not (triton.knobs.runtime.interpret and isinstance(tl.sum, interpreter.InterpretedFunction)):
        raise RuntimeError("the interpreter is off: set TRITON_INTERPRET=1 before triton is imported")
    if hasattr(interpreter, "_mended"):
        return
    _check_internals()
    builder = interpreter.InterpreterBuilder
    for name in ("binary_op", "unary_op", "create_clampf", "create_dot"):
        _replace(builder, name, functools.partial(_in_wider, tl.float32))
    _replace(builder, "create_fma", functools.partial(_in_wider, tl.float64))  # fp32 would round the sum twice
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)  # 3.6 lets NaN through,
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)  # compiled code does not
    builder.get_bf16 = lambda self, value: _handle(_narrow(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)
    _replace(interpreter, "_convert_float", _convert_float)
    _replace(builder, "cast_impl", _cast)
    _replace(builder, "create_descriptor_load", _descriptor_load)
    _replace(interpreter.ReduceOps, "sum", _sum)
    _replace(interpreter.ReduceOps, "min_max", _min_max)
    _replace(interpreter.ScanOps, "cumsum", _scan)
    _replace(interpreter.ScanOps, "cumprod", _scan)
    interpreter._mended = True


def _check_internals() -> None:
    for owner, functions in _EXPECTED.items():
        for name, expected in functions.items():
            function = getattr(getattr(interpreter, owner, None) if owner else interpreter, name, None)
            found = list(inspect.signature(function).parameters) if callable(function) else []
            if found[: len(expected.split())] != expected.split():
                raise RuntimeError(
                    f"triton {triton.__version__} has another interpreter: {owner or 'module'}.{name}({expected}) is "
                    f"now {found or 'gone'}; see whether interpreter_shim.py is still needed, and adapt it"
                )


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let `function` take the place of `name`; it gets the original as its first argument. NaN and overflow are silent
    there, as on a GPU."""
    original = getattr(owner, name)

    @functools.wraps(original)
    @np.errstate(all="ignore")
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)


# Values and bits


def _is_narrow(dtype: Any) -> bool:
    return bool(dtype.is_floating() and dtype.primitive_bitwidth < 32)


def _torch_dtype(dtype: Any) -> torch.dtype:
    if dtype not in _TORCH_DTYPES:
        raise NotImplementedError(f"the interpreter cannot compute with {dtype}")
    return _TORCH_DTYPES[dtype]


def _handle(data: NDArray[Any], dtype: Any) -> Any:
    return interpreter.TensorHandle(data, dtype)


def _widen(data: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A narrow type's bits as fp32, exactly."""
    bits = np.array(data).view(f"int{dtype.primitive_bitwidth}")  # a copy, since torch wants writable memory
    return np.asarray(torch.from_numpy(bits).view(_torch_dtype(dtype)).to(torch.float32).numpy())


def _narrow(values: NDArray[Any], dtype: Any, rounding: Any = None) -> NDArray[Any]:
    """fp32 or fp64 as a narrow type's bits, in the numpy type in which the interpreter keeps them. Rounds once."""
    exact = torch.from_numpy(np.array(_round_to_odd(values) if values.dtype == np.float64 else values))
    if dtype.is_fp8():
        limit = torch.finfo(_torch_dtype(dtype)).max
        exact = exact.clamp(-limit, limit)  # keeps NaN
    rounded = exact.to(_torch_dtype(dtype))
    bits = rounded.view(torch.int8 if dtype.primitive_bitwidth == 8 else torch.int16).numpy()
    if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        bits = bits - (rounded.float().abs() > exact.abs()).numpy()  # one step towards zero, whatever the sign
    return np.asarray(bits.view(interpreter._get_np_dtype(dtype)))


def _round_to_odd(values: NDArray[Any]) -> NDArray[Any]:
    """fp64 as fp32 such that rounding that to a narrower type gives what rounding the fp64 value would have given."""
    near = values.astype(np.float32)
    toward_zero = near.view(np.uint32) - (np.abs(near) > np.abs(values))
    return np.asarray((toward_zero | (near != values)).view(np.float32))


# What takes the place of the interpreter's functions


def _in_wider(wide: Any, original: Any, self: Any, *operands: Any) -> Any:
    """The operation with narrow operands as `wide`. It gives the last tensor's type, or int1 for a comparison."""

    def widened(operand: Any) -> Any:
        if not isinstance(operand, interpreter.TensorHandle) or not _is_narrow(operand.dtype.scalar):
            return operand
        values = _widen(operand.data, operand.dtype.scalar)
        return _handle(values.astype(interpreter._get_np_dtype(wide)), wide)

    dtype = [x.dtype.scalar for x in operands if isinstance(x, interpreter.TensorHandle)][-1]
    result = original(self, *map(widened, operands))
    if result.data.dtype == np.bool_:
        return _handle(result.data, tl.int1)  # the interpreter says the operands' type: a splat then makes floats of it
    return _handle(_narrow(result.data, dtype), dtype) if _is_narrow(dtype) else result


def _convert_float(original: Any, input: NDArray[Any], input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    if not _is_narrow(input_dtype) and not _is_narrow(output_dtype):
        return original(input, input_dtype, output_dtype, rounding_mode)
    values = _widen(input, input_dtype) if _is_narrow(input_dtype) else input
    if _is_narrow(output_dtype):
        values = _narrow(values, output_dtype, rounding_mode)
    else:
        values = values.astype(interpreter._get_np_dtype(output_dtype))
    return values.view(f"uint{output_dtype.primitive_bitwidth}")


def _cast(original: Any, self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if not _is_narrow(source) and not _is_narrow(target):
        return original(self, src, dst_type)
    values = _widen(src.data, source) if _is_narrow(source) else src.data
    if not _is_narrow(target):
        return _handle(values.astype(interpreter._get_np_dtype(target)), target)
    return _handle(_narrow(values if source == tl.float32 else values.astype(np.float64), target), target)


def _descriptor_load(original: Any, self: Any, desc: Any, indices: Any, *policies: Any) -> Any:
    result = original(self, desc, indices, *policies)
    if desc.padding == interpreter._ir.PADDING_OPTION.PAD_NAN and _is_narrow(result.dtype):
        mask = np.asarray(desc.materialize_pointers(indices)[1].data)
        result.data = np.where(mask, result.data, _narrow(np.array([np.nan]), result.dtype))
    return result


def _sum(original: Any, self: Any, input: Any) -> Any:
    dtype = input.dtype.scalar
    if not _is_narrow(dtype):
        return original(self, input)
    values = _widen(input.handle.data, dtype)
    terms = values.reshape(-1) if self.axis is None else np.moveaxis(values, self.axis, 0)
    while len(terms) > 1:
        low, high = np.split(terms, 2)
        terms = _widen(_narrow(low + high, dtype), dtype)
    total = terms[0]
    if self.keep_dims:
        total = total.reshape([1] * values.ndim) if self.axis is None else np.expand_dims(total, self.axis)
    return self.to_tensor(_narrow(total, dtype), dtype)


def _min_max(original: Any, self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    values = input[0] if isinstance(input, tuple) else input
    dtype = values.dtype.scalar
    if not _is_narrow(dtype):
        return original(self, input, *args, **kwargs)

    def narrowed(result: Any) -> Any:
        if result.dtype != tl.float32:
            return result  # indices
        handle = _handle(_narrow(result.handle.data, dtype), dtype)
        return tl.tensor(handle, tl.block_type(dtype, result.shape) if result.type.is_block() else dtype)

    found = original(self, self.to_tensor(_widen(values.handle.data, dtype), tl.float32), *args, **kwargs)
    return tuple(map(narrowed, found)) if isinstance(found, tuple) else narrowed(found)


def _scan(original: Any, self: Any, input: Any) -> Any:
    if not _is_narrow(input.dtype.scalar) or input.dtype.scalar == tl.float16:  # numpy rounds fp16 at each step
        return original(self, input)
    return self.generic_scan((input,))  # element by element with the combining function: slow, but seldom needed
