"""The identity rule where layers have windows: all of them, or some beside full attention; with attention sinks or not.

Reference: transformers' own dense pass. A block that left every window is full of NaN, or another's, from then on:
unless the prefix cache keeps it, so that most requests here take no part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nereid.batch import CopyBlock, SwapIn
from nereid.errors import ConfigError
from nereid.request import Request
from tests.conftest import TOLERANCES
from tests.engine.draws import draws
from tests.engine.test_deterministic import assert_same_bits
from tests.engine.test_identity import BLOCK, check, make_requests
from tests.engine.test_kv_ways import again, every_length
from tests.engine.tiny import SteppedEngine, make_tiny_ministral, make_tiny_mistral, reference_logits

WINDOW = 11

Windowed = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=[make_tiny_mistral, make_tiny_ministral], ids=["mistral", "ministral"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    directory = tmp_path_factory.mktemp("windowed")
    make: Callable[[Path, int], transformers.PreTrainedModel] = request.param
    return directory, make(directory, WINDOW)


def uncached(requests: list[Request]) -> list[Request]:
    """Whose blocks are free as soon as they left every window."""
    return [replace(request, cache=False) for request in requests]


@pytest.mark.parametrize("num_sink_tokens", [0, 4])
@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_logits_equal_transformers_in_chunks_and_decodes(
    windowed: Windowed, step_tokens: int, num_sink_tokens: int
) -> None:
    directory, model = windowed
    requests = uncached(make_requests([3, 30, 90], max_tokens=30))
    settings: dict[str, object] = {"max_num_batched_tokens": step_tokens, "attention_sink_tokens": num_sink_tokens}
    engine = SteppedEngine(directory, {"block_size": BLOCK, **settings})
    drawn = draws(engine, requests)
    for request in requests:
        tokens = engine.tokens[request.request_id]
        expected = reference_logits(model, request.prompt_token_ids, tokens, num_sink_tokens)
        bound = TOLERANCES["logits_float32"] * float(expected.abs().max())
        torch.testing.assert_close(torch.stack(drawn[request.request_id]), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("make", [make_tiny_mistral, make_tiny_ministral])
@pytest.mark.parametrize("window", [1, BLOCK, WINDOW, 2 * BLOCK + 1, 500])
def test_every_length_around_the_edges_of_blocks_and_windows(
    tmp_path: Path, window: int, make: Callable[[Path, int], transformers.PreTrainedModel]
) -> None:
    model = make(tmp_path, window)
    requests = uncached(make_requests(list(range(1, 4 * BLOCK + 1)), max_tokens=2 * BLOCK + 1))
    engine = SteppedEngine(tmp_path, {"block_size": BLOCK, "num_blocks": 700})
    check(model, requests, engine.run(requests))


SCARCE: dict[str, int] = {"num_blocks": 8, "max_num_batched_tokens": 13}  # so many blocks for each group


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},  # alone
        {"max_num_batched_tokens": 7},  # chunked
        {**SCARCE, "host_cache_bytes": 0},  # preempted and recomputed
        SCARCE,  # preempted and swapped
        {**SCARCE, "attention_sink_tokens": 4},
        {"block_size": 1},
        {"block_size": 256},
        {"attention_sink_tokens": 1},
        {"attention_sink_tokens": BLOCK + 1, "max_num_batched_tokens": 7},
        {"attention_sink_tokens": 300},
        {**SCARCE, "attention_sink_tokens": 4, "attention_backend": "cpu"},  # PyTorch, not the native library
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", [False, True])
def test_tokens_do_not_depend_on_the_way(windowed: Windowed, settings: dict[str, Any], cache: bool) -> None:
    directory, model = windowed
    requests = make_requests([1, 7, 8, 9, 23, 40, 16, 31], max_tokens=40, temperature=0.8)
    requests = requests if cache else uncached(requests)
    num_groups = 3 if hasattr(model.config, "layer_types") else 1
    num_blocks = num_groups * SCARCE["num_blocks"] if settings.keys() >= SCARCE.keys() else 900
    engine = SteppedEngine(directory, {"block_size": BLOCK, **settings, "num_blocks": num_blocks})
    check(model, requests, engine.run(requests), settings.get("attention_sink_tokens", 0))
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks < 900)


@pytest.mark.parametrize("num_sink_tokens", [0, 4])
def test_what_is_found_at_every_length_changes_nothing(windowed: Windowed, num_sink_tokens: int) -> None:
    directory, model = windowed
    requests = every_length()
    settings = {"block_size": BLOCK, "max_num_batched_tokens": 64, "attention_sink_tokens": num_sink_tokens}
    engine = SteppedEngine(directory, {**settings, "num_blocks": 60})
    engine.run(requests)
    engine.run(again(requests))
    assert engine.ops[CopyBlock] > 0 and engine.ops[SwapIn] > 0
    check(model, [*requests, *again(requests)], engine.tokens, num_sink_tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_sink_tokens", [0, 4])
def test_deterministic_bits_do_not_depend_on_what_is_beside_them(
    windowed: Windowed, dtype: str, num_sink_tokens: int
) -> None:
    lengths, max_tokens = ([1, 8, 11, 23, 40, 90], 12) if dtype == "float32" else ([8, 31, 40], 8)
    requests = uncached(make_requests(lengths, max_tokens))
    settings = {"dtype": dtype, "block_size": BLOCK, "num_blocks": 800, "attention_sink_tokens": num_sink_tokens}
    assert_same_bits(windowed[0], requests, settings)


def test_a_window_s_blocks_are_enough_for_any_length(tmp_path: Path) -> None:
    """A text of 25 blocks in four, and one more for its first tokens; with the prefix cache, which gives way."""
    model = make_tiny_mistral(tmp_path, WINDOW)
    requests = make_requests([100], max_tokens=100)
    for num_sink_tokens, num_blocks in ((0, 4), (4, 5)):
        settings = {"block_size": BLOCK, "max_num_batched_tokens": BLOCK, "attention_sink_tokens": num_sink_tokens}
        engine = SteppedEngine(tmp_path, {**settings, "num_blocks": 1 + num_blocks, "host_cache_bytes": 0})
        check(model, requests, engine.run(requests), num_sink_tokens)
        assert engine.scheduler.num_preemptions == 0


def test_sinks_make_a_difference(windowed: Windowed) -> None:
    """What is compared above is not what it would be without them."""
    request = make_requests([40], max_tokens=8)[0]
    runs = [
        SteppedEngine(windowed[0], {"block_size": BLOCK, "attention_sink_tokens": number}).run([request])
        for number in (0, 1, 4)
    ]
    assert len({str(run[request.request_id]) for run in runs}) == 3


def test_sinks_of_a_model_without_windows_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="attention_sink_tokens: got 4; allowed for a model without windows: 0"):
        SteppedEngine(directory, {"attention_sink_tokens": 4})
