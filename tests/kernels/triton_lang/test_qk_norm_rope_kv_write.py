"""qk_norm_rope_kv_write against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nereid_kernels import qk_norm_rope_kv_write as ops
from nereid_kernels.formats import QUANTISED, scale_dtype
from nereid_kernels.kv_write import plan_kv_write, split_scales
from nereid_kernels.reference import qk_norm_rope_kv_write as reference
from nereid_kernels.reference.kv_write import dequantise
from tests.kernels.bounds import assert_as_good_as_plain
from tests.kernels.triton_lang.devices import BACKENDS

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BLOCKS, BLOCK_SIZE = 3, 8
SLOTS = [17, -1, 23, 3, 12]  # the second token is padding


def make_inputs(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norm: bool
) -> dict[str, Any]:
    tokens, width = len(SLOTS), (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width + 3).to(dtype)[:, :width]  # strided rows
    angles = torch.rand(tokens, rotary_dim // 2).repeat(1, 2) * 6
    weights = torch.randn(2, head_dim).to(dtype) if norm else (None, None)
    return {
        "qkv": qkv,
        "cos_sin": torch.stack([angles.cos(), angles.sin()], dim=1),
        "slot_mapping": torch.tensor(SLOTS),
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-6,
        "weight_offset": 1.0,
    }


def make_caches(dtype: torch.dtype, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    pool = torch.zeros(BLOCKS, 2, 2, kv_heads, BLOCK_SIZE, head_dim).to(dtype)
    return pool[:, 1, 0], pool[:, 1, 1]


def make_scales(form: str, kv_heads: int, cache_dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    if form == "none":
        return None, None
    shape = {"tensor": (1,), "head": (kv_heads,), "token": (BLOCKS, kv_heads, BLOCK_SIZE)}[form]
    scales = (torch.rand(2, *shape) / 50 + 0.03).bfloat16().float()  # as int32, with an offset of 0
    k_scale, v_scale = scales.view(scale_dtype(cache_dtype, by_token=form == "token"))
    return k_scale, v_scale


def restore(cache: Tensor, scale: Tensor | None) -> Tensor:
    """A cache's values, [block, kv_head, slot, head_dim]."""
    if cache.dtype not in QUANTISED:
        return cache
    if scale is not None:
        scale = scale[..., None] if scale.dim() == 3 else scale.reshape(-1, 1, 1)
    return dequantise(cache, scale, torch.float32)


def as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "form", "shape", "norm"),
    [  # shape: heads, kv_heads, head_dim, rotary_dim
        (torch.float32, torch.float32, "none", (9, 3, 40, 40), True),
        (torch.float32, torch.float32, "none", (11, 11, 40, 24), False),
        (torch.bfloat16, torch.bfloat16, "none", (4, 2, 64, 64), True),
        (torch.float16, torch.float16, "none", (2, 1, 123, 16), True),
        (torch.bfloat16, E4M3, "token", (4, 2, 64, 64), True),
        (torch.float32, E4M3, "none", (4, 2, 64, 64), True),
        (torch.bfloat16, E5M2, "head", (4, 2, 64, 32), True),
        (torch.float32, INT8, "token", (9, 3, 40, 40), True),
        (torch.bfloat16, INT8, "token", (4, 2, 64, 32), True),
        (torch.bfloat16, INT8, "tensor", (4, 2, 64, 64), False),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_its_definition(
    dtype: torch.dtype, cache_dtype: torch.dtype, form: str, shape: tuple[int, int, int, int], norm: bool, backend: str
) -> None:
    _, kv_heads, head_dim, _ = shape
    inputs = make_inputs(dtype, *shape, norm)
    scales = make_scales(form, kv_heads, cache_dtype)
    caches, plain_caches = (make_caches(cache_dtype, kv_heads, head_dim) for _ in range(2))
    exact_caches = make_caches(torch.float64, kv_heads, head_dim)
    plain_scales = tuple(None if scale is None else scale.clone() for scale in scales)
    exact = call(reference, as_double(inputs), exact_caches)
    plain = call(reference, inputs, plain_caches, plain_scales)
    query = run(inputs, caches, scales, backend)
    assert_as_good_as_plain(query, exact, plain)
    stored = zip(caches, exact_caches, plain_caches, scales, plain_scales, strict=True)
    for cache, exact_cache, plain_cache, scale, plain_scale in stored:
        assert_as_good_as_plain(restore(cache, scale), exact_cache, restore(plain_cache, plain_scale))
    if cache_dtype == dtype:
        assert torch.equal(caches[1], plain_caches[1]), "values are copied"


def call(
    module: Any,
    inputs: dict[str, Any],
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, ...] = (None, None),
) -> Tensor:
    result: Tensor = module.qk_norm_rope_kv_write(
        **inputs, k_cache=caches[0], v_cache=caches[1], k_scale=scales[0], v_scale=scales[1]
    )
    return result


def run(
    inputs: dict[str, Any],
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, ...] = (None, None),
    backend: str = "triton_lang",
) -> Tensor:
    """The operation itself, which takes a plan where the reference takes a slot mapping."""
    planned = {name: value for name, value in inputs.items() if name != "slot_mapping"}
    planned["plan"] = plan_kv_write(inputs["slot_mapping"], caches[0], backend=backend)
    return call(ops, planned, caches, scales)


def test_padding_is_stored_nowhere_and_no_token_is_no_launch() -> None:
    inputs = make_inputs(torch.float32, 4, 2, 16, 16, True)
    inputs["qkv"][1] = float("nan")
    caches = make_caches(torch.float32, 2, 16)
    query = run(inputs, caches)
    kept = [0, 2, 3, 4]
    assert query[1].isnan().all() and query[kept].isfinite().all()
    assert all(cache.isfinite().all() and cache.count_nonzero() == 4 * 2 * 16 for cache in caches)
    inputs |= {name: inputs[name][:0] for name in ("qkv", "cos_sin", "slot_mapping")}
    assert run(inputs, caches).shape == (0, 4, 16)


def test_refuses_what_does_not_fit() -> None:
    inputs = make_inputs(torch.float32, 4, 2, 16, 16, True)
    caches = make_caches(torch.float32, 2, 16)
    wide = torch.zeros(5, 2, 18)
    for change, error, said in [
        ({"qkv": inputs["qkv"][:, :-1]}, ValueError, r"qkv: got shape \[5, 127\]"),
        ({"qkv": inputs["qkv"][:, : 4 * 16]}, ValueError, "more than 2"),
        ({"cos_sin": wide}, ValueError, "cos_sin: got rotary_dim 18; allowed: even, at most head_dim=16"),
        ({"cos_sin": wide.half()}, ValueError, "rotary_dim 18"),
        ({"cos_sin": inputs["cos_sin"].half()}, TypeError, "cos_sin: got torch.float16"),
        ({"k_weight": None}, ValueError, "both or none"),
        ({"slot_mapping": inputs["slot_mapping"][:3]}, ValueError, "slot_mapping: got shape"),
    ]:
        with pytest.raises(error, match=said):
            run(inputs | change, caches)


def test_is_a_proper_operation() -> None:
    inputs = make_inputs(torch.float32, 4, 2, 16, 16, True)
    caches = make_caches(INT8, 2, 16)
    before = (inputs[name] for name in ("qkv", "cos_sin"))
    after = (inputs[name] for name in ("slot_mapping", "q_weight", "k_weight", "eps", "weight_offset"))
    arguments = (*before, *caches, *after, *split_scales(*make_scales("token", 2, INT8)))
    torch.library.opcheck(ops._qk_norm_rope_kv_write, arguments, test_utils=("test_schema", "test_faketensor"))
