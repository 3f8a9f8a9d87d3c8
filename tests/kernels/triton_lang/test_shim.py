"""The mended interpreter computes what a GPU would, bit for bit; one tiny kernel a kind of fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tests.kernels.interpreter_shim import install
from tests.kernels.triton_lang.devices import interpreter_only

pytestmark = interpreter_only

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FLOATS = [FP32, FP16, BF16, E4M3, E5M2]


@triton.jit
def _apply(x_ptr: Any, y_ptr: Any, out_ptr: Any, count: Any, OP: tl.constexpr, BLOCK: tl.constexpr) -> None:
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count)
    y = tl.load(y_ptr + offsets, mask=offsets < count)
    if OP == "convert":
        result = x.to(out_ptr.dtype.element_ty)
    elif OP == "truncate":
        result = x.to(out_ptr.dtype.element_ty, fp_downcast_rounding="rtz")
    elif OP == "bitcast":
        result = x.to(out_ptr.dtype.element_ty, bitcast=True)
    elif OP == "add":
        result = x + y
    elif OP == "sub":
        result = x - y
    elif OP == "mul":
        result = x * y
    elif OP == "div":
        result = x / y
    elif OP == "maximum":
        result = tl.maximum(x, y)
    elif OP == "minimum":
        result = tl.minimum(x, y)
    elif OP == "clamp":
        result = tl.clamp(x, -y, y)
    elif OP == "clamp_nan":
        result = tl.clamp(x, -y, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "scale":
        result = x * 1.7 + 1
    elif OP == "neg":
        result = -x
    elif OP == "abs":
        result = tl.abs(x)
    elif OP == "exp":
        result = tl.exp(x.to(tl.float32))
    elif OP == "where":
        result = tl.where((x < y) & (x != 0), x, y)
    elif OP == "lt":
        result = x < y
    elif OP == "le":
        result = x <= y
    elif OP == "gt":
        result = x > y
    elif OP == "ge":
        result = x >= y
    elif OP == "eq":
        result = x == y
    elif OP == "ne":
        result = x != y
    tl.store(out_ptr + offsets, result, mask=offsets < count)


@triton.jit
def _reduce(
    x_ptr: Any, out_ptr: Any, OP: tl.constexpr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
) -> None:
    x = tl.load(x_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :])
    if OP == "sum":
        result = tl.sum(x, AXIS, keep_dims=True)
    elif OP == "max":
        result = tl.max(x, AXIS, keep_dims=True)
    elif OP == "min":
        result = tl.min(x, AXIS, keep_dims=True)
    elif OP == "argmax":
        result = tl.argmax(x, AXIS, keep_dims=True)
    elif OP == "cumsum":
        result = tl.cumsum(x, AXIS)
    elif OP == "scan_sum":
        result = tl.associative_scan(x, AXIS, tl.standard._sum_combine)
    elif OP == "scan_product":
        result = tl.associative_scan(x, AXIS, tl.standard._prod_combine)
    elif OP == "reduce_max":
        result = tl.reduce(x, AXIS, tl.standard._elementwise_max, keep_dims=True)
    rows: tl.constexpr = result.shape[0]
    cols: tl.constexpr = result.shape[1]
    tl.store(out_ptr + tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :], result)


@triton.jit
def _sum_all(x_ptr: Any, out_ptr: Any, BLOCK: tl.constexpr) -> None:
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))


@triton.jit
def _fma(xyz_ptr: Any, out_ptr: Any) -> None:
    tl.store(out_ptr, tl.fma(tl.load(xyz_ptr), tl.load(xyz_ptr + 1), tl.load(xyz_ptr + 2)))


@triton.jit
def _dot(a_ptr: Any, b_ptr: Any, out_ptr: Any, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr) -> None:
    a = tl.load(a_ptr + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    b = tl.load(b_ptr + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :])
    out = out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out, tl.dot(a, b, tl.load(out), input_precision="ieee", out_dtype=out_ptr.dtype.element_ty))


@triton.jit
def _copy_masked(x_ptr: Any, out_ptr: Any, count: Any, BLOCK: tl.constexpr) -> None:
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=-1.7)
    tl.store(out_ptr + offsets, x, mask=offsets < BLOCK - 1)


@triton.jit
def _copy_described(x_ptr: Any, out_ptr: Any, rows: Any, ROWS: tl.constexpr, COLS: tl.constexpr) -> None:
    described = tl.make_tensor_descriptor(
        x_ptr, shape=[rows, COLS], strides=[COLS, 1], block_shape=[ROWS, COLS], padding_option="nan"
    )
    x = described.load([0, 0])
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], x)


@triton.jit
def _scalar_condition(x_ptr: Any, out_ptr: Any, BLOCK: tl.constexpr) -> None:
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, offsets, mask=(tl.load(x_ptr) < 1) & (offsets < BLOCK // 2))


def _run(op: str, dtype: torch.dtype, x: Tensor, y: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    block = triton.next_power_of_2(x.numel())
    _apply[(1,)](x, x if y is None else y, out, x.numel(), OP=op, BLOCK=block)
    return out


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _assert_same(result: Tensor, expected: Tensor) -> None:
    """The same bits, but any NaN is as good as another."""
    assert result.dtype == expected.dtype and result.shape == expected.shape
    nan = expected.double().isnan()
    assert torch.equal(result.double().isnan(), nan)
    differ = (_bits(result) != _bits(expected)) & ~nan
    assert not differ.any(), f"{result[differ][:5]} instead of {expected[differ][:5]}"


def _all_values(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of an 8-bit or 16-bit type; of a wider one, what is special about the narrower types."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(65536).to(torch.int16).view(dtype)
    limits = [torch.finfo(t) for t in FLOATS]
    edges = [v for f in limits for v in (f.max, f.tiny, f.smallest_normal, f.eps, f.tiny * f.eps, 1 + f.eps / 2)]
    edges += [0.0, 1.0, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65520.0, 1e-45, float("inf"), float("nan")]
    values = torch.tensor(edges, dtype=FP64).to(dtype)
    values = torch.cat([values, torch.randn(1000).to(dtype)])
    above, below = values.nextafter(values + torch.inf), values.nextafter(values - torch.inf)
    return torch.cat([values, above, below, -values, -above, -below])


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's conversion, but to fp8 it saturates, as `cvt.rn.satfinite` does."""
    if dtype.itemsize == 1 and dtype != x.dtype:
        limit = torch.finfo(dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_converts_every_value(source: torch.dtype, target: torch.dtype) -> None:
    x = _all_values(source)
    _assert_same(_run("convert", target, x), _converted(x, target))


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_converts_integers(dtype: torch.dtype) -> None:
    x = _all_values(INT8)
    _assert_same(_run("convert", dtype, x), x.to(dtype))
    _assert_same(_run("convert", INT8, x.to(dtype) * 0.75), (x.to(dtype) * 0.75).to(INT8))
    x = torch.tensor(
        [2**24 + 1, 2**24 + 2**16 + 1, -(2**24) - 2**16 - 1, 65519, 65521], dtype=torch.int32
    )  # one rounding
    _assert_same(
        _run("convert", BF16, x), torch.tensor([2**24, 2**24 + 2**17, -(2**24) - 2**17, 2**16, 2**16]).to(BF16)
    )


@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [FP32, FP64], ids=str)
def test_rounds_to_nearest_even(source: torch.dtype, dtype: torch.dtype) -> None:
    """Independently of torch's conversions: positive floats lie in the order of their bits."""
    values = _all_values(dtype)[: 1 << (dtype.itemsize * 8 - 1)].double()
    values = values[values.isfinite()]
    ties = (values[:-1] + values[1:]) / 2
    lower = torch.arange(len(ties))
    x = ties.to(source)
    assert torch.equal(x.double(), ties)
    up, down = x.nextafter(torch.tensor(torch.inf, dtype=source)), x.nextafter(torch.tensor(0.0, dtype=source))
    result = _run("convert", dtype, torch.cat([x, up, down, -x]))
    on_tie, above, below, negative = _bits(result).long().chunk(4)
    assert torch.equal(on_tie, lower + lower % 2)
    assert torch.equal(above, lower + 1)
    assert torch.equal(below, lower)
    assert torch.equal(negative, on_tie - (1 << (dtype.itemsize * 8 - 1)))
    assert torch.equal(_run("truncate", dtype, torch.cat([up, -up])).double(), torch.cat([values[:-1], -values[:-1]]))


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (E4M3, 1e9, 448.0),
        (E4M3, float("-inf"), -448.0),
        (E5M2, 1e9, 57344.0),
        (E5M2, float("-inf"), -57344.0),
        (BF16, 3.4e38, float("inf")),
        (FP16, 65520.0, float("inf")),
    ],
)
def test_overflow(dtype: torch.dtype, value: float, expected: float) -> None:
    assert _run("convert", dtype, torch.tensor([value])).double().item() == expected


@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3, E5M2], ids=str)
def test_bitcasts(dtype: torch.dtype) -> None:
    x = _all_values(dtype)
    bits = _run("bitcast", _bits(x).dtype, x)
    assert torch.equal(bits, _bits(x))
    assert torch.equal(_bits(_run("bitcast", dtype, bits)), _bits(x))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "maximum", "minimum", "where"])
def test_arithmetic(op: str, dtype: torch.dtype) -> None:
    x = _all_values(dtype)
    y = x[torch.randperm(len(x))]
    result = _run(op, dtype, x, y)
    if op == "where":
        wanted = torch.where((x < y) & (x != 0), x, y)
    elif op in ("maximum", "minimum"):  # a number wins over NaN; which of the two zeros wins is left open
        wanted = torch.where(x.isnan(), y, torch.where(y.isnan(), x, getattr(torch, op)(x, y))) + 0
        result = result + 0
    else:
        wanted = getattr(torch, op)(x, y)
    _assert_same(result, wanted)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons(op: str, dtype: torch.dtype) -> None:
    x = _all_values(dtype)
    y = torch.where(torch.rand(len(x)) < 0.5, x.float(), x[torch.randperm(len(x))].float()).to(dtype)
    expected = getattr(torch, op)(x.float(), y.float())
    assert torch.equal(_run(op, INT8, x, y), expected.to(INT8))
    assert torch.equal(_run(op, BF16, x, y), expected.to(BF16))  # int1, whatever was compared


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("op", ["clamp", "clamp_nan"])
def test_clamp(op: str, dtype: torch.dtype) -> None:
    x = torch.randn(1024).to(dtype)
    limit = x.flip(0).abs()
    _assert_same(_run(op, dtype, x, limit), x.clamp(-limit, limit))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_condition_on_a_scalar(dtype: torch.dtype) -> None:
    for x, expected in ((0.5, [0, 1, 2, 3, -1, -1, -1, -1]), (2.0, [-1] * 8)):
        out = torch.full((8,), -1)
        _scalar_condition[(1,)](torch.tensor([x], dtype=dtype), out, BLOCK=8)
        assert out.tolist() == expected


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_unary(dtype: torch.dtype) -> None:
    x = _all_values(dtype)
    _assert_same(_run("abs", dtype, x), x.abs())
    # 3.6 compiles -x as 0 - x.
    _assert_same(_run("neg", dtype, x), -x if hasattr(interpreter.InterpreterBuilder, "create_fneg") else 0 - x)
    x = torch.randn(1024).to(dtype)
    if dtype != FP32:  # numpy's exp is not torch's in the last place
        _assert_same(_run("exp", dtype, x), x.double().exp().to(dtype))


@pytest.mark.parametrize(
    ("dtype", "product", "tiny"), [(BF16, (1 + 2**-4, 1 + 2**-4), 2**-30), (FP16, (1 + 2**-5, 1 + 2**-6), 2**-24)]
)
def test_fma_rounds_once(dtype: torch.dtype, product: tuple[float, float], tiny: float) -> None:
    """The product is a tie; the sum's last term decides it, but is lost where the sum is rounded to fp32 first."""
    half = torch.finfo(dtype).eps / 2
    for sign in (1, -1):
        out = torch.empty(1, dtype=dtype)
        _fma[(1,)](torch.tensor([*product, sign * tiny], dtype=dtype), out)
        assert out.item() == product[0] * product[1] + sign * half


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_constants_have_the_operand_type(dtype: torch.dtype) -> None:
    x = torch.randn(1024).to(dtype)
    _assert_same(_run("scale", dtype, x), x * torch.tensor(1.7, dtype=dtype) + 1)


def _tree_sum(x: Tensor, axis: int) -> Tensor:
    """Rounded at each step, as compiled code adds, though in an order of its own."""
    while x.shape[axis] > 1:
        low, high = x.chunk(2, axis)
        x = low + high
    return x


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions(axis: int, dtype: torch.dtype) -> None:
    rows, cols = 16, 64
    x = torch.randn(rows, cols).to(dtype)

    def reduced(op: str, to: torch.dtype = dtype) -> Tensor:
        shape = [rows, cols]
        if op not in ("cumsum", "scan_sum", "scan_product"):
            shape[axis] = 1
        out = torch.empty(shape, dtype=to)
        _reduce[(1,)](x, out, OP=op, AXIS=axis, ROWS=rows, COLS=cols)
        return out

    _assert_same(reduced("sum"), _tree_sum(x, axis))
    _assert_same(reduced("max"), x.amax(axis, keepdim=True))
    _assert_same(reduced("min"), x.amin(axis, keepdim=True))
    _assert_same(reduced("reduce_max"), x.amax(axis, keepdim=True))
    for op, combine in (("scan_sum", torch.add), ("scan_product", torch.mul)):
        steps = list(accumulate(x.unbind(axis), combine))
        _assert_same(reduced(op), torch.stack(steps, axis))
    assert torch.equal(reduced("argmax", torch.int32), x.argmax(axis, keepdim=True).int())
    # Some versions scan bf16 in fp32, others in bf16.
    bound = x.shape[axis] * torch.finfo(dtype).eps * x.double().abs().cumsum(axis)
    assert ((reduced("cumsum").double() - x.double().cumsum(axis)).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_sum_of_everything(dtype: torch.dtype) -> None:
    x, out = torch.randn(1024).to(dtype), torch.empty(1, dtype=dtype)
    _sum_all[(1,)](x, out, BLOCK=1024)
    _assert_same(out, _tree_sum(x, 0))


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"), [(FP32, FP32), (FP16, FP16), (BF16, BF16), (E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2)]
)
def test_dot(a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 64).to(a_dtype), torch.randn(64, 32).to(b_dtype)
    out = torch.randn(16, 32)
    exact = out.double() + a.double() @ b.double()
    bound = 64 * torch.finfo(FP32).eps * (out.double().abs() + a.double().abs() @ b.double().abs())
    _dot[(1,)](a, b, out, M=16, N=32, K=64)
    assert ((out.double() - exact).abs() <= bound).all()


def test_dot_of_integers() -> None:
    a, b = torch.randint(-128, 128, (16, 64), dtype=INT8), torch.randint(-128, 128, (64, 32), dtype=INT8)
    out = torch.full((16, 32), 2**24, dtype=torch.int32)
    _dot[(1,)](a, b, out, M=16, N=32, K=64)
    assert torch.equal(out, 2**24 + a.int() @ b.int())


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_masked_load_and_store(dtype: torch.dtype) -> None:
    x, out = torch.randn(16).to(dtype), torch.full((16,), 9.0, dtype=dtype)
    _copy_masked[(1,)](x, out, 10, BLOCK=16)
    expected = torch.cat([x[:10], torch.tensor([-1.7] * 5 + [9.0]).to(dtype)])
    _assert_same(out, expected)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_descriptor_pads_with_nan(dtype: torch.dtype) -> None:
    x, out = torch.randn(8, 16).to(dtype), torch.empty(8, 16, dtype=dtype)
    _copy_described[(1,)](x, out, 5, ROWS=8, COLS=16)
    _assert_same(out[:5], x[:5])
    assert out[5:].isnan().all()


def test_installs_once() -> None:
    before = interpreter.InterpreterBuilder.binary_op
    install()
    assert interpreter.InterpreterBuilder.binary_op is before


def test_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as off, pytest.raises(RuntimeError, match="the interpreter is off"):
        off.setenv("TRITON_INTERPRET", "0")
        install()
    with monkeypatch.context() as late, pytest.raises(RuntimeError, match="before triton is imported"):
        late.setattr(tl, "sum", triton.runtime.JITFunction(tl.sum.fn))
        install()


def test_notices_another_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpreter, "_mended")
    monkeypatch.setattr(interpreter.ReduceOps, "sum", lambda self, values: None)
    with pytest.raises(RuntimeError, match=r"ReduceOps.sum\(self input\) is now \['self', 'values'\]"):
        install()
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_dot")
    with pytest.raises(RuntimeError, match=r"create_dot\(.*\) is now gone"):
        install()


def _sum_of_ones() -> Tensor:
    out = torch.empty(1, dtype=BF16)
    _sum_all[(1,)](torch.ones(16, dtype=BF16), out, BLOCK=16)
    return out


def _dot_of_ones() -> Tensor:
    out = torch.zeros(16, 16)
    _dot[(1,)](torch.ones(16, 16, dtype=BF16), torch.ones(16, 16, dtype=BF16), out, M=16, N=16, K=16)
    return out


FAULTS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "bf16 arithmetic": (lambda: _run("add", BF16, torch.ones(1, dtype=BF16)), 2.0),
    "bf16 comparison": (lambda: _run("lt", INT8, -torch.ones(1, dtype=BF16), torch.ones(1, dtype=BF16)), 1.0),
    "bf16 sum": (_sum_of_ones, 16.0),
    "bf16 dot": (_dot_of_ones, 16.0),
    "fp32 to bf16 rounding": (lambda: _run("convert", BF16, torch.tensor([1.999])), 2.0),
    "fp32 to fp8 rounding": (lambda: _run("convert", E4M3, torch.tensor([1.999])), 2.0),
    "fp32 to fp8 saturation": (lambda: _run("convert", E4M3, torch.tensor([1000.0])), 448.0),
    "fp8 NaN": (lambda: _run("convert", FP32, torch.tensor([float("nan")]).to(E4M3)), float("nan")),
}


def _faults() -> list[str]:
    """Those of FAULTS that this process's interpreter has."""
    wanted = {name: torch.tensor(value, dtype=FP64) for name, (_, value) in FAULTS.items()}
    return [n for n, (f, _) in FAULTS.items() if not torch.allclose(f().double(), wanted[n], 0, 0, equal_nan=True)]


def test_all_faults_are_mended() -> None:
    assert _faults() == []


def test_the_interpreter_is_still_wrong_without_the_shim() -> None:
    """Where this fails, triton has mended a fault itself: take it out of FAULTS, and what mends it out of the shim."""
    code = "from tests.kernels.triton_lang.test_shim import _faults; print(*_faults(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(FAULTS)
