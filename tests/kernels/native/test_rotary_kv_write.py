"""Rotary embedding and the KV write against the implementation in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

from nereid_kernels.formats import scale_dtype
from nereid_kernels.kv_write import plan_kv_write
from nereid_kernels.native.library import Library
from nereid_kernels.native.program import LayerKV, Program
from nereid_kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from nereid_kernels.reference.kv_write import dequantise
from tests.kernels.native.programs import DTYPES, arrays, filled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "block_size"), [(64, 64, 16), (10, 6, 7), (80, 40, 1)])
def test_what_is_turned_and_stored_equals_the_other_implementation(
    library: Library,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    heads, kv_heads, tokens, num_blocks = 6, 2, 9, 12
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    qkv[0, heads * head_dim :] = 0.0  # a row whose largest number is 0
    values = qkv[:, (heads + kv_heads) * head_dim :]
    values[1, :head_dim], values[2, ::head_dim], values[3, 3], values[4] = 2.5, 40.0, math.inf, -math.inf
    values[5, 1::3] = math.nan if cache_dtype == torch.int8 else 0.0
    values[6], values[7], values[7, ::5] = -0.0, 3.38e38, -3.3e38
    angles = torch.rand(40, rotary_dim) * 6
    cos_sin, positions = torch.stack((angles.cos(), angles.sin()), dim=1), torch.randperm(40)[:tokens]
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    shape = (num_blocks, 2, 2, kv_heads, block_size)
    caches = [torch.zeros(*shape, head_dim, dtype=cache_dtype or dtype) for _ in range(2)]
    dtype_of_scales = scale_dtype(cache_dtype, by_token=True) if cache_dtype else dtype
    scales = [torch.zeros(shape, dtype=dtype_of_scales) if cache_dtype else None for _ in range(2)]
    layers = [
        LayerKV(pool[:, 1, 0], pool[:, 1, 1], None if scale is None else scale[:, 1, 0],
                None if scale is None else scale[:, 1, 1])
        for pool, scale in zip(caches, scales, strict=True)
    ]  # fmt: skip
    program = Program(library, dtype, tokens, 1)
    turned = filled(program, qkv)
    program.rotary_kv_write(turned, cos_sin, layers[0])
    program.run(arrays(tokens, positions=positions, groups=((slots, torch.zeros(1, 1, dtype=torch.int32)),)))
    other = layers[1]
    expected = qk_norm_rope_kv_write(
        qkv, cos_sin[positions], other.k, other.v, plan_kv_write(slots, other.k), k_scale=other.k_scale,
        v_scale=other.v_scale,
    )  # fmt: skip
    # A product and a sum may be rounded once or twice.
    rtol, atol = 2 * torch.finfo(dtype).eps, 4e-7 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(turned.memory[:, : heads * head_dim], expected.flatten(1), rtol=rtol, atol=atol)
    of_scales = (None if scale is None else scale[..., None] for scale in scales)
    stored, wanted = (dequantise(*stored, torch.float32) for stored in zip(caches, of_scales, strict=True))
    if cache_dtype:
        rtol = 0.5 if cache_dtype == torch.int8 else 0.07  # to the next code
        atol = float(wanted[:, :, 0].abs().max()) / 100
    assert bool((stored != 0).any())
    torch.testing.assert_close(stored[:, :, 0], wanted[:, :, 0], rtol=rtol, atol=atol)
    for ours, theirs in (caches, scales):  # values are not turned: the very bits
        if ours is not None and theirs is not None:
            assert torch.equal(ours[:, :, 1].view(torch.uint8), theirs[:, :, 1].view(torch.uint8))
