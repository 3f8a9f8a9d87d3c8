"""The identity rule over the ways in which KV comes to be where it is needed: computed, found in the prefix cache to
the token, swapped, kept in the host's memory, read from disk after a restart. A block that nobody holds is full of NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from nereid.batch import CopyBlock, LoadBlock, StoreBlock, SwapIn, SwapOut
from nereid.request import Request, SamplingParams
from tests.engine.draws import draws
from tests.engine.test_identity import BLOCK, check, make_requests
from tests.engine.tiny import VOCAB, SteppedEngine

SETTINGS: dict[str, object] = {"block_size": BLOCK, "max_num_batched_tokens": 64}


def again(requests: Iterable[Request], shift: int = 1000) -> list[Request]:
    """The same requests under other ids."""
    return [replace(request, request_id=request.request_id + shift) for request in requests]


def every_length() -> list[Request]:
    """Prompts of 1 to 4 blocks' tokens, one beginning of another up to some token, in one tenant."""
    rng = random.Random(3)
    text = [rng.randrange(3, VOCAB) for _ in range(4 * BLOCK)]
    requests = []
    for length in range(1, 4 * BLOCK + 1):
        same = rng.randrange(length + 1)
        prompt = (*text[:same], *(rng.randrange(3, VOCAB) for _ in range(length - same)))
        sampling = SamplingParams(temperature=0.7 * (length % 2), max_tokens=BLOCK + 2, ignore_eos=True, seed=length)
        requests.append(Request(length, prompt, sampling, arrival_time=0.0))
    return requests


def test_what_is_found_at_every_length_changes_nothing(model: transformers.LlamaForCausalLM, directory: Path) -> None:
    requests = every_length()
    engine = SteppedEngine(directory, {**SETTINGS, "num_blocks": 600})
    engine.run(requests)
    cold = engine.num_computed_tokens
    engine.run(again(requests))
    check(model, [*requests, *again(requests)], engine.tokens)
    assert engine.ops[CopyBlock] > len(requests), "no block was taken in part"
    # Of a prompt that was seen, its last token alone is computed; and what follows, anew.
    assert engine.num_computed_tokens - cold == sum(1 + r.sampling.max_tokens - 1 for r in requests)


def test_a_request_without_cache_neither_finds_nor_is_found(directory: Path) -> None:
    (request,) = make_requests([30], max_tokens=2)
    engine = SteppedEngine(directory, SETTINGS)
    engine.run([replace(request, cache=False)])
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks
    for shift, expected in ((1, 31), (2, 31 - 3 * BLOCK)):
        before = engine.num_computed_tokens
        engine.run(again([request], shift))
        assert engine.num_computed_tokens - before == expected
    before = engine.num_computed_tokens
    engine.run([replace(request, request_id=9, cache=False)])
    assert engine.num_computed_tokens - before == 31


def test_another_salt_finds_nothing(directory: Path) -> None:
    (request,) = make_requests([30], max_tokens=2)
    engine = SteppedEngine(directory, SETTINGS)
    engine.run([request])
    before = engine.num_computed_tokens
    engine.run([replace(request, request_id=9, cache_salt="another")])
    assert engine.num_computed_tokens - before == 31


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"max_num_batched_tokens": 13}], ids=str)
def test_what_comes_back_from_the_host_changes_nothing(
    model: transformers.LlamaForCausalLM, directory: Path, settings: dict[str, object]
) -> None:
    requests = make_requests([5, 8, 23, 40, 16, 31], max_tokens=12, temperature=0.8)
    engine = SteppedEngine(directory, {**SETTINGS, "num_blocks": 12, **settings})
    for round_number in range(3):
        engine.run(again(requests, 1000 * round_number))
    assert engine.ops[SwapOut] > 20 and engine.ops[SwapIn] > 20
    check(model, [r for n in range(3) for r in again(requests, 1000 * n)], engine.tokens)


@pytest.mark.parametrize("host_cache_bytes", [0, 100_000])
def test_a_restart_with_the_same_disk_starts_warm(
    model: transformers.LlamaForCausalLM, directory: Path, tmp_path: Path, host_cache_bytes: int
) -> None:
    requests = make_requests([5, 8, 23, 40, 16, 31], max_tokens=12, temperature=0.8)
    settings = {**SETTINGS, "num_blocks": 12, "host_cache_bytes": host_cache_bytes, "disk_cache_dir": str(tmp_path)}
    first = SteppedEngine(directory, settings)
    first.run(requests)
    assert first.ops[StoreBlock] > 5 or host_cache_bytes
    first.close()
    second = SteppedEngine(directory, settings)
    second.run(again(requests))
    assert second.ops[LoadBlock] > 5 and second.num_failed_loads == 0
    assert second.num_computed_tokens < first.num_computed_tokens - 40
    check(model, again(requests), second.tokens)
    second.close()


def test_a_disk_that_lost_or_damaged_its_files_costs_time_alone(
    model: transformers.LlamaForCausalLM, directory: Path, tmp_path: Path
) -> None:
    requests = make_requests([23, 40, 16, 31], max_tokens=12)
    settings = {**SETTINGS, "disk_cache_dir": str(tmp_path)}
    first = SteppedEngine(directory, settings)
    first.run(requests)
    first.close()
    second = SteppedEngine(directory, settings)
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            path.write_bytes(path.read_bytes()[:-9] + b"damaged!!")
    second.run(again(requests))
    assert second.num_failed_loads > 3
    check(model, again(requests), second.tokens)
    second.close()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "host_cache_bytes"),
    [
        ("float32", "auto", 60_000),
        ("bfloat16", "auto", 30_000),
        ("float32", "int8", 25_000),
        ("bfloat16", "fp8_e4m3", 25_000),
    ],
)
def test_every_way_gives_the_same_bits(
    directory: Path, tmp_path: Path, dtype: str, kv_dtype: str, host_cache_bytes: int
) -> None:
    requests = make_requests([5, 8, 23, 40, 16, 31, 17], max_tokens=20)
    fixed = {"deterministic": True, "dtype": dtype, "kv_dtype": kv_dtype, "disk_cache_dir": str(tmp_path)}
    settings: dict[str, object] = {**SETTINGS, **fixed}
    cold = draws(SteppedEngine(directory, {**settings, "num_blocks": 200, "max_num_seqs": 1}), requests)
    small = SteppedEngine(directory, {**settings, "num_blocks": 12, "host_cache_bytes": host_cache_bytes})
    ways = [draws(small, again(requests, shift)) for shift in (1000, 2000)]
    assert small.ops[SwapIn] > 5 and small.ops[StoreBlock] > 0 and small.scheduler.num_preemptions > 0
    small.close()
    restarted = SteppedEngine(directory, {**settings, "num_blocks": 60})
    ways.append(draws(restarted, again(requests, 3000)))
    ways.append(draws(restarted, again(requests, 4000)))
    assert restarted.ops[LoadBlock] > 5 and restarted.ops[CopyBlock] > 0
    for request in requests:
        for shift, way in zip((1000, 2000, 3000, 4000), ways, strict=True):
            pairs = zip(cold[request.request_id], way[request.request_id + shift], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"request {request.request_id}, way {shift}"
