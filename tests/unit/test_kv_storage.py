"""What a page of the KV cache holds, and where; plain and quantised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nereid.kv_memory.groups import KVCacheGroup, groups_of
from nereid.kv_memory.storage import KVCacheStorage, LayerCache, page_bytes, sizes
from nereid.model_config import ModelConfig

E4M3 = torch.float8_e4m3fn
SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
ODD = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}


def make_groups(sizes: dict[str, int], block_size: int, dtype: torch.dtype, windows: str = "") -> Any:
    """windows: a letter a layer, of which "w" has one; as many layers as `sizes` says by default."""
    fixed: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    }  # fmt: skip
    config = ModelConfig.from_mapping({**fixed, **sizes}, {})
    if windows:
        config = replace(config, layer_windows=tuple(32 if letter == "w" else 0 for letter in windows))
    return groups_of(config, block_size, dtype)


def tensors_of(cache: LayerCache) -> list[torch.Tensor]:
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize(
    ("model", "block_size", "windows"),
    [
        (SMOLLM2, 16, ""),
        (ODD, 8, ""),
        (ODD, 1, ""),
        ({**ODD, "head_dim": 7}, 3, ""),
        ({**SMOLLM2}, 16, "wwwf" * 7 + "ff"),
    ],
    ids=["smollm2", "odd", "one-slot", "odd-head", "windows"],
)
def test_every_byte_belongs_to_one_tensor(
    dtype: torch.dtype, model: dict[str, int], block_size: int, windows: str
) -> None:
    groups = make_groups(model, block_size, dtype, windows)
    num_blocks, num_layers = 3, model["num_hidden_layers"]
    storage = KVCacheStorage(groups, num_blocks, torch.device("cpu"))
    for index in range(len(groups)):  # groups lie over each other, for a block is of one of them
        storage.pages.zero_()
        layers = [cache for cache in map(storage.layer, range(num_layers)) if cache.group == index]
        assert len(layers) == len(groups[index].layers)
        for cache in layers:
            for tensor in tensors_of(cache):
                tensor.view(torch.uint8).copy_(tensor.view(torch.uint8) + 1)
        taken = sum(x.numel() * x.element_size() for cache in layers for x in tensors_of(cache))
        assert storage.pages.max() == 1 and storage.pages.count_nonzero() == taken
        assert 0 <= num_blocks * groups[index].bytes_per_block - taken < num_blocks * 16  # scales start aligned
    assert groups[0].bytes_per_block <= page_bytes(groups) < groups[0].bytes_per_block + 64 * model["head_dim"]


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_a_copied_page_is_the_block_with_its_scales(dtype: torch.dtype) -> None:
    storage = KVCacheStorage(make_groups(ODD, 4, dtype), 3, torch.device("cpu"))
    storage.pages.random_(0, 256)
    storage.pages[2] = storage.pages[1]
    for layer in range(3):
        for tensor in tensors_of(storage.layer(layer)):
            assert torch.equal(tensor[2].view(torch.uint8), tensor[1].view(torch.uint8))
            assert not torch.equal(tensor[2].view(torch.uint8), tensor[0].view(torch.uint8))


@pytest.mark.parametrize(("dtype", "of_scales"), [(torch.int8, torch.int32), (E4M3, torch.float32)], ids=str)
def test_shapes_and_strides_are_those_of_the_kernels(dtype: torch.dtype, of_scales: torch.dtype) -> None:
    storage = KVCacheStorage(make_groups(SMOLLM2, 16, dtype), 5, torch.device("cpu"))
    first = storage.first_of_group(0)
    assert first.k_scale is not None
    assert first.k.shape == (5, 3, 16, 64) and first.k.dtype == dtype
    assert first.k_scale.shape == (5, 3, 16) and first.k_scale.dtype == of_scales
    for layer in range(30):
        cache = storage.layer(layer)
        assert cache.k_scale is not None and cache.v_scale is not None
        assert cache.k.stride() == cache.v.stride() == first.k.stride() == (storage.pages.shape[1], 1024, 64, 1)
        assert cache.k_scale.stride() == cache.v_scale.stride() == (storage.pages.shape[1] // 4, 16, 1)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors_of(cache))  # what the widest loads want


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_a_byte_holds_at_least_1_85_times_as_many_blocks_as_with_bfloat16(dtype: torch.dtype) -> None:
    """SmolLM2; with wider heads more."""
    plain, quantised = (page_bytes(make_groups(SMOLLM2, 16, d)) for d in (torch.bfloat16, dtype))
    assert plain == 30 * 2 * 3 * 16 * 64 * 2
    assert quantised == 30 * 2 * 3 * 16 * (64 + 4)
    assert plain / quantised >= 1.85


def test_sizes_are_told() -> None:
    plain, quantised = (make_groups(SMOLLM2, 16, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert sizes(plain, plain) == "torch.bfloat16, 23040 bytes a token, 368640 a block"
    assert sizes(quantised, plain) == (
        "torch.int8, 12240 bytes a token, 195840 a block; 1.88 times the tokens of torch.bfloat16"
    )


def test_a_plain_group_has_no_scales() -> None:
    (group,) = make_groups(ODD, 8, torch.float32)
    assert isinstance(group, KVCacheGroup) and not group.is_quantised
    assert len(group.scale_bytes) == 0 and group.bytes_per_block == group.data_bytes
