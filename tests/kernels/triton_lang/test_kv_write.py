"""kv_write against its definition: copies and quantised caches alike bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nereid_kernels import kv_write as ops
from nereid_kernels.formats import LARGEST_WITH_OFFSET, scale_dtype
from nereid_kernels.reference import kv_write as reference
from nereid_kernels.reference.kv_write import dequantise
from tests.kernels.triton_lang.devices import BACKENDS, Reserve

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 3, 16, 40
INF, NAN = float("inf"), float("nan")
SLOTS = [17, -1, 63, 3, 32]  # the second token is padding


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *scales: Tensor | None,
    backend: str = "triton_lang",
) -> None:
    """The operation itself, which takes a plan where the reference takes a slot mapping."""
    plan = ops.plan_kv_write(slot_mapping, k_cache, backend=backend)
    ops.kv_write(key, value, k_cache, v_cache, plan, *scales)


def make_caches(dtype: torch.dtype, layers: int = 2) -> tuple[Tensor, Tensor]:
    """The views of the last layer of a pool [block, layer, k/v, kv_head, slot, head_dim] whose bytes are all 0x55."""
    pool = torch.empty(BLOCKS, layers, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    pool.view(torch.uint8).fill_(0x55)
    return pool[:, -1, 0], pool[:, -1, 1]


def make_scales(form: str, cache_dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    if form == "none":
        return None, None
    shape = {"tensor": (1,), "head": (KV_HEADS,), "token": (BLOCKS, 2, KV_HEADS, BLOCK_SIZE)}[form]
    scales = torch.rand(2, *shape) / 50 + 0.01
    k_scale, v_scale = scales.view(scale_dtype(cache_dtype, by_token=form == "token"))
    return (k_scale[:, 1], v_scale[:, 1]) if form == "token" else (k_scale, v_scale)


def make_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as parts of one matrix, with what is hard to quantise among them."""
    qkv = torch.randn(len(SLOTS), 3 * KV_HEADS, HEAD_DIM, dtype=dtype)
    qkv[0, :, :4] = torch.tensor([0.0, -0.0, 60000.0, -60000.0])
    qkv[1] = float("nan")  # padding
    qkv[2, :, :4] = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")])
    qkv[3, 1:] = 0.0
    qkv[4, :, 7] += 30.0
    qkv[4, 2::3] = -0.0
    return qkv[:, KV_HEADS : 2 * KV_HEADS], qkv[:, 2 * KV_HEADS :]


def bits(*tensors: Tensor | None) -> list[Tensor]:
    """A NaN in float8 is as good as another: GPUs differ in its sign."""
    return [_canonical(tensor.contiguous()).view(torch.uint8) for tensor in tensors if tensor is not None]


def _canonical(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (E4M3, E5M2):
        return tensor
    return tensor.view(torch.uint8).masked_fill(tensor.float().isnan(), 0x7F)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "form"),
    [
        (torch.bfloat16, torch.bfloat16, "none"),
        (torch.float32, torch.float32, "none"),
        (torch.float16, torch.float16, "none"),
        *((torch.bfloat16, quantised, form) for quantised in (E4M3, E5M2, INT8) for form in ("head", "token")),
        (torch.float32, E4M3, "token"),
        (torch.float16, E4M3, "tensor"),
        (torch.float16, E5M2, "none"),
    ],
)
def test_equals_its_definition(dtype: torch.dtype, cache_dtype: torch.dtype, form: str) -> None:
    key, value = make_rows(dtype)
    scales = make_scales(form, cache_dtype)
    expected_scales = tuple(None if scale is None else scale.clone() for scale in scales)
    expected, slot_mapping = make_caches(cache_dtype), torch.tensor(SLOTS)
    reference.kv_write(key, value, *expected, slot_mapping, *expected_scales)
    for backend in BACKENDS:
        caches = make_caches(cache_dtype)
        given = tuple(None if scale is None else scale.clone() for scale in scales)
        kv_write(key, value, *caches, slot_mapping, *given, backend=backend)
        for result, wanted in zip(bits(*caches, *given), bits(*expected, *expected_scales), strict=True):
            assert torch.equal(result, wanted), backend


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_and_many_heads(tokens: int) -> None:
    """More heads than one program takes, and a block size that is no power of two."""
    key, value = torch.randn(2, tokens, 11, 5)
    k_cache, v_cache = torch.zeros(2, 3, 11, 6, 5)
    kv_write(key, value, k_cache, v_cache, torch.tensor([10] * tokens, dtype=torch.int64))
    assert torch.equal(k_cache[1, :, 4].expand(tokens, 11, 5), key) and k_cache.count_nonzero() == key.numel()
    assert torch.equal(v_cache[1, :, 4].expand(tokens, 11, 5), value) and v_cache.count_nonzero() == value.numel()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float8_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Every upper half of a float32, with the lower halves that decide about a tie: float8 keeps fewer bits than an
    upper half has, so that every other float32 is rounded as one of these."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0xFFFF], dtype=torch.int32)
    x = (upper[:, None] | lower).view(torch.float32).reshape(12, 4, 4096)
    limit = torch.finfo(dtype).max
    wanted = x.clamp(-limit, limit).to(dtype)
    k_cache, v_cache = torch.zeros(2, 1, 4, 12, 4096).to(dtype)
    kv_write(x, x, k_cache, v_cache, torch.arange(12))
    assert all(map(torch.equal, bits(k_cache[0].transpose(0, 1)), bits(wanted)))


def test_int8_is_rounded_to_even() -> None:
    x = torch.arange(-300, 300, dtype=torch.float32).reshape(1, 1, 600) / 2
    x = torch.cat([x, x.nextafter(torch.tensor(1e9)), x.nextafter(torch.tensor(-1e9))], dim=1)
    k_cache, v_cache = torch.zeros(2, 1, 3, 1, 600, dtype=INT8)
    kv_write(x, x, k_cache, v_cache, torch.tensor([0]), torch.ones(1), torch.ones(1))
    assert torch.equal(k_cache[0, :, 0], x[0].round().clamp(-127, 127).to(INT8))


def test_a_token_scale_of_small_and_large_rows() -> None:
    """Rows whose largest magnitude is 0, subnormal, close to the largest float32, infinite, or a NaN."""
    x = torch.tensor([0.0, 1e-42, 3.4e38, INF, NAN])[:, None, None].repeat(1, 1, 2)
    k_cache, v_cache = torch.zeros(2, 1, 1, 5, 2).to(E4M3)
    k_scale, v_scale = torch.zeros(2, 1, 1, 5)
    kv_write(x, x, k_cache, v_cache, torch.arange(5), k_scale, v_scale)
    restored = k_cache[0, 0].double() * k_scale[0, 0].double()[:, None]
    wanted = torch.tensor([0.0, 0.0, 3.4e38, torch.finfo(torch.float32).max, NAN], dtype=torch.float64)
    torch.testing.assert_close(restored, wanted[:, None].expand(5, 2), rtol=1e-6, atol=1e-40, equal_nan=True)


def stored_in_int8(rows: Tensor, backend: str) -> Tensor:
    """rows: [heads, head_dim]. What they are read as, from a cache with a scale and an offset for each."""
    k_cache, v_cache = torch.zeros(2, 1, len(rows), 1, rows.shape[1], dtype=INT8)
    k_scale, v_scale = torch.zeros(2, 1, len(rows), 1, dtype=torch.int32)
    kv_write(rows[None], rows[None], k_cache, v_cache, torch.tensor([0]), k_scale, v_scale, backend=backend)
    assert torch.equal(k_cache, v_cache) and torch.equal(k_scale, v_scale)
    return dequantise(k_cache[0], k_scale[0, ..., None], torch.float32)[:, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_halves_the_steps_of_a_row_that_is_large_on_one_side(backend: str) -> None:
    rows = torch.randn(50, 64)
    rows[:, 5] += torch.linspace(-40, 40, 50)
    span = rows.amax(dim=1) - rows.amin(dim=1)
    error = (stored_in_int8(rows, backend) - rows).abs().amax(dim=1)
    assert (error <= 1.02 * span / 254 / 2).all()  # half a step; scale and offset are rounded


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_of_special_rows(backend: str) -> None:
    limit = LARGEST_WITH_OFFSET
    rows = torch.tensor([
        [0.0, 0.0, 0.0, 0.0], [-0.0, -0.0, 0.0, -0.0], [7.25, 7.25, 7.25, 7.25], [-1e-42, 1e-42, 0.0, 0.0],
        [limit, limit, limit, limit], [3.4e38, 3.4e38, 3.4e38, 3.4e38], [-3.4e38, -3.4e38, 3.4e38, 3.4e38],
        [INF, INF, INF, INF], [-INF, -INF, -INF, INF], [NAN, NAN, NAN, NAN], [NAN, 1.0, -1.0, 1.0],
        [NAN, 5.0, 5.0, 5.0],
    ])  # fmt: skip
    wanted = torch.tensor([
        *[[0.0, 0.0, 0.0, 0.0]] * 2, [7.25, 7.25, 7.25, 7.25], [0.0, 0.0, 0.0, 0.0],
        *[[limit, limit, limit, limit]] * 2, [-limit, -limit, limit, limit],
        [limit, limit, limit, limit], [-limit, -limit, -limit, limit], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, -1.0, 1.0],
        [5.0, 5.0, 5.0, 5.0],
    ])  # fmt: skip
    stored = stored_in_int8(rows, backend)
    assert stored.bfloat16().isfinite().all()
    torch.testing.assert_close(stored, wanted, rtol=0.003, atol=1e-40)
    equal = (rows == rows[:, :1]).all(dim=1) & (rows.abs() <= limit).all(dim=1)
    assert torch.equal(stored[equal], rows[equal]) and equal.sum() == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_numbers_with_an_offset_stay_finite(backend: str) -> None:
    """Whatever the row's range is: half a step beyond it is still a bfloat16."""
    low = torch.linspace(-1.0, 1.0, 201)[:, None] * 3.4e38
    rows = torch.cat((low, low.new_full(low.shape, INF), low, low), dim=1)
    for signed in (rows, -rows):
        stored = stored_in_int8(signed, backend)
        assert stored.bfloat16().isfinite().all()
        clamped = signed.clamp(-LARGEST_WITH_OFFSET, LARGEST_WITH_OFFSET)
        assert ((stored - clamped).abs() <= 2.0**120 * 1.01).all()


def test_a_block_past_two_to_the_31_elements(reserve: Reserve) -> None:
    pool = reserve(3 << 30, torch.uint8).view(E4M3).view(3 << 10, 64, 2, 2, 16, 256)
    k_cache, v_cache = pool[:, 63, 0], pool[:, 63, 1]
    last = k_cache.shape[0] - 1
    assert last * k_cache.stride(0) > 1 << 31
    key, value = torch.randn(2, 2, 2, 256)
    kv_write(key, value, k_cache, v_cache, torch.tensor([last * 16 + 5, 3]))
    for new, cache in ((key, k_cache), (value, v_cache)):
        assert torch.equal(cache[last, :, 5].float(), new[0].to(E4M3).float())
        assert torch.equal(cache[0, :, 3].float(), new[1].to(E4M3).float())


def test_refuses_what_does_not_fit() -> None:
    key, value = make_rows(torch.float32)
    slots = torch.tensor(SLOTS)
    plain, int8, fp8 = make_caches(torch.float32), make_caches(INT8), make_caches(E4M3)
    ones = (torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="value: got shape"):
        kv_write(key, value[:, :1], *plain, slots)
    with pytest.raises(ValueError, match=r"v_cache: got strides .* as k_cache"):
        kv_write(key, value, plain[0], plain[1].contiguous(), slots)
    with pytest.raises(TypeError, match="k_cache: got torch.float16"):
        kv_write(key, value, *make_caches(torch.float16), slots)
    with pytest.raises(TypeError, match="slot_mapping: got torch.int32"):
        kv_write(key, value, *plain, slots.int())
    with pytest.raises(ValueError, match="k_scale: got None"):
        kv_write(key, value, *int8, slots)
    with pytest.raises(ValueError, match="both or none"):
        kv_write(key, value, *fp8, slots, ones[0])
    with pytest.raises(ValueError, match="since the cache is torch.float32"):
        kv_write(key, value, *plain, slots, *ones)
    with pytest.raises(ValueError, match=r"k_scale: got shape \[2\]"):
        kv_write(key, value, *fp8, slots, torch.ones(2), torch.ones(2))


def test_is_a_proper_operation() -> None:
    key, value = make_rows(torch.float32)
    for form in ("head", "token"):
        scales = ops.split_scales(*make_scales(form, INT8))
        arguments = (key, value, *make_caches(INT8), torch.tensor(SLOTS), *scales)
        torch.library.opcheck(ops._kv_write, arguments, test_utils=("test_schema", "test_faketensor"))
