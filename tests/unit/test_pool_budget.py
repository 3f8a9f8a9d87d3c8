"""How many blocks the pool gets: exact, by each setting, or refused with what there was and what took it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereid.batch import BlockGroup, Capacity
from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_memory.budget import MemoryUse, PoolBudget, PoolSize, describe_pool

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
MIB, GIB = 1 << 20, 1 << 30
PAGE = MIB
BOOKS = 1024 + 64 * 16  # kept of a block of 16 tokens beside it
FULL, WINDOW = BlockGroup(), BlockGroup(window=8)
# 10 GiB, of which this process holds 1 and will hold another 0.5 (with HOST); others hold 2.
HOST = 212 * MIB
MEMORY = MemoryUse(10 * GIB, 7 * GIB, GIB, (("the largest step", 300 * MIB),))


def budget(
    groups: tuple[BlockGroup, ...] = (FULL,), page: int = PAGE, *, on_gpu: bool = False, **settings: Any
) -> PoolBudget:
    config = EngineConfig.from_mapping({"model": "x", "host_cache_bytes": HOST, **settings})
    return PoolBudget(config, BlockLayout(config.block_size, groups, 512), page, on_gpu)


@pytest.mark.parametrize(
    ("settings", "num_blocks", "decided_by"),
    [
        ({}, 1024, "the default"),
        ({"kv_cache_bytes": 100 * MIB + 7}, 100, "kv_cache_bytes"),
        ({"num_blocks": 55}, 55, "num_blocks"),
        ({"gpu_memory_utilization": 0.5}, (5120 - 1024 - 512) * MIB // (PAGE + BOOKS), "gpu_memory_utilization 0.5"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_bytes": 90 * MIB}, 90, "kv_cache_bytes"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_bytes": 90 * MIB, "num_blocks": 8}, 8, "num_blocks"),
    ],
)
def test_the_first_setting_that_is_given_decides(settings: dict[str, Any], num_blocks: int, decided_by: str) -> None:
    assert budget(**settings).size(MEMORY) == PoolSize(num_blocks, decided_by)


def test_a_gpu_is_used_up_to_nine_tenths_and_never_beyond_what_is_free() -> None:
    idle = MemoryUse(10 * GIB, 9 * GIB, GIB, (("the largest step", 512 * MIB),))
    assert budget(on_gpu=True).size(idle) == PoolSize(9216 - 1024 - 512, "the default")
    size = budget(on_gpu=True).size(MEMORY)
    assert size.num_blocks == 7168 - 300, "the host's memory is another one"
    assert size.warning.startswith(
        "the default stands for 7.71 GiB, but there is room for 6.71 GiB: taken of 10.00 GiB"
    )


def test_a_share_beyond_what_is_available_is_cut_and_says_so() -> None:
    size = budget(gpu_memory_utilization=0.95).size(MEMORY)
    assert size.num_blocks == (7168 - 512) * MIB // (PAGE + BOOKS)
    assert size.decided_by == "gpu_memory_utilization 0.95"
    assert size.warning == (
        "gpu_memory_utilization 0.95 stands for 8.00 GiB, but there is room for 6.50 GiB: taken of 10.00 GiB: 1.00 GiB "
        "by this process with the model's weights, 0.29 GiB by the largest step, 0.21 GiB by host_cache_bytes; "
        "available now: 7.00 GiB"
    )


def test_the_default_on_the_cpu_is_less_where_there_is_less() -> None:
    size = budget(host_cache_bytes=0).size(MemoryUse(4 * GIB, GIB, 3 * GIB, (("the largest step", GIB // 2),)))
    assert size.num_blocks == 512 and size.warning.startswith("the default stands for 1.00 GiB, but there is room for")


def test_what_is_asked_for_beyond_what_is_free_is_given_with_a_warning() -> None:
    """Others may give theirs back; and memory is taken only as blocks are used."""
    size = budget(kv_cache_bytes=8 * GIB).size(MEMORY)
    assert size.num_blocks == 8192 and "the system may end a process" in size.warning
    assert budget(num_blocks=6 * 1024).size(MEMORY).warning == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_cache_bytes": 9 * GIB},
            rf"kv_cache_bytes: got {9 * GIB}; allowed: at most {10 * GIB - 1536 * MIB}; taken of 10\.00 GiB: 1\.00 "
            r"GiB by this process with the model's weights, 0\.29 GiB by the largest step, 0\.21 GiB by "
            r"host_cache_bytes; available now: 7\.00 GiB",
        ),
        ({"num_blocks": 9000}, r"num_blocks: got 9000; allowed: at most 8704; taken of"),
        (
            {"kv_cache_bytes": 2 * MIB - 1},
            rf"got {2 * MIB - 1}, which is 1 blocks; allowed: at least {2 * MIB}, 2 blocks",
        ),
        (
            {"gpu_memory_utilization": 0.15},
            r"gpu_memory_utilization: got 0\.15; taken of 10\.00 GiB: 1\.00 GiB by this process .*; left for the KV "
            rf"cache: 0 bytes; allowed: at least {2 * (PAGE + BOOKS)} \(the null block and a request of 2 tokens\), "
            r"gpu_memory_utilization 0\.151$",
        ),
        ({"gpu_memory_utilization": 0}, rf"got 0; .*left for the KV cache: -{1536 * MIB} bytes; allowed: at least"),
    ],
)
def test_no_room_is_refused_with_what_there_was_and_what_took_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        budget(**settings).size(MEMORY)


def test_the_default_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for a KV cache; taken of .* left for the KV cache: 0 bytes"):
        budget(host_cache_bytes=0).size(MemoryUse(4 * GIB, GIB // 2, 3 * GIB, (("the largest step", GIB // 2),)))


@pytest.mark.parametrize(
    ("groups", "block_size", "least"),
    [
        ((FULL,), 16, 2),
        ((FULL,), 1, 3),
        ((FULL, WINDOW, WINDOW), 16, 4),
        ((FULL, BlockGroup(window=1)), 1, 5),
        ((BlockGroup(window=4, num_sink_tokens=2),), 2, 2),
    ],
)
def test_the_least_pool_holds_two_tokens_in_every_group(
    groups: tuple[BlockGroup, ...], block_size: int, least: int
) -> None:
    assert budget(groups, block_size=block_size, num_blocks=least).asked_blocks() == least
    assert budget(groups, block_size=block_size, num_blocks=least).max_model_len(100) >= 2
    if least > 2:
        with pytest.raises(ConfigError, match=f"num_blocks: got {least - 1}; allowed: at least {least}"):
            budget(groups, block_size=block_size, num_blocks=least - 1).max_model_len(100)
    with pytest.raises(ConfigError, match=f"kv_cache_bytes: got .*allowed: at least {least * PAGE}"):
        budget(groups, block_size=block_size, kv_cache_bytes=least * PAGE - 1).asked_blocks()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 8192),
        ({"max_model_len": 100}, 100),
        ({"max_model_len": 9000}, 8192),
        ({"num_blocks": 11}, 160),
        ({"num_blocks": 11, "max_model_len": 100}, 100),
        ({"kv_cache_bytes": 3 * PAGE, "max_model_len": 100}, 32),
        ({"gpu_memory_utilization": 0.9}, 8192),  # not known yet
    ],
)
def test_the_longest_request_before_there_is_a_pool(settings: dict[str, Any], expected: int) -> None:
    assert budget(**settings).max_model_len(8192) == expected


def test_the_pool_in_a_line() -> None:
    line = describe_pool(Capacity(1456, 737280, 16), BlockLayout(16), 8192)
    assert line == "KV cache: 1,455 blocks of 16 tokens = 23,280 tokens, 1.00 GiB; 2.8 requests of 8,192 tokens at once"
    assert f"\n{line}\n" in README, "the line that README shows"
    mixed = BlockLayout(4, (FULL, WINDOW), 4)  # a request of 40 tokens: 10 blocks, and 4 of the window's
    line = describe_pool(Capacity(29, 1024, 4, mixed.groups), mixed, 40)
    assert line == "KV cache: 28 blocks of 4 tokens = 56 tokens, 0.03 MiB; 2.0 requests of 40 tokens at once"
