"""The KV cache's size on a real load: within its share of the memory, told in the log, and a bound to requests."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from nereid.errors import ConfigError, ErrorCode
from nereid.request import FinishReason
from tests.engine.test_engine import Bench
from tests.engine.tiny import SteppedEngine

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PAGE = 7680  # 3 layers, keys and values, 2 heads, 16 tokens of 10 numbers of 4 bytes


@pytest.mark.parametrize("pool_mib", [64, 160])
def test_a_process_with_its_whole_pool_written_stays_within_its_share(directory: Path, pool_mib: int) -> None:
    command = [sys.executable, "-m", "tests.engine.fill_pool", str(directory), str(pool_mib)]
    filled = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    told = json.loads(filled.stdout.splitlines()[-1])
    assert told["pool"] >= pool_mib * MIB // 3, "the share is used: what loading takes and books of blocks come off it"
    assert told["peak"] <= told["allowed"]


def test_a_share_below_what_the_process_holds_is_refused(directory: Path) -> None:
    message = r"gpu_memory_utilization: got 0\.001; taken of .* by this process with the model's weights, .* left for"
    with pytest.raises(ConfigError, match=message):
        SteppedEngine(directory, {"num_blocks": None, "gpu_memory_utilization": 0.001})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_bytes": 2 * PAGE - 1}, rf"kv_cache_bytes: got {2 * PAGE - 1}, .*; allowed: at least {2 * PAGE}"),
        ({"kv_cache_bytes": 1 << 50}, rf"kv_cache_bytes: got {1 << 50}; allowed: at most \d+; taken of"),
        ({"num_blocks": 2, "block_size": 1}, "num_blocks: got 2; allowed: at least 3"),
        ({"num_blocks": 1 << 31}, r"num_blocks: got 2147483648; allowed: at most \d+; taken of"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_at_load(directory: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SteppedEngine(directory, {"num_blocks": None, **settings})


def test_the_default_is_a_gibibyte_and_prompts_are_timed(directory: Path) -> None:
    engine = SteppedEngine(directory, {"num_blocks": None})
    assert engine.runner.capacity.num_blocks == (1 << 30) // PAGE
    assert engine.runner.capacity.rates is not None and engine.runner.capacity.rates.prefill_tokens_per_s > 0


@pytest.mark.parametrize(
    ("settings", "step", "lines"),
    [
        (
            {"num_blocks": 60},
            "512 tokens of 64 requests",
            [
                "KV cache: 59 blocks of 16 tokens = 944 tokens, 0.44 MiB; 1.8 requests of 512 tokens at once",
                "ready: at most 512 tokens a request, 64 requests at once",
            ],
        ),
        (
            {"num_blocks": None, "kv_cache_bytes": 13 * PAGE + 5, "max_model_len": 400, "max_num_seqs": 2},
            "382 tokens of 2 requests",  # 191 and one to be drawn, twice
            [
                "KV cache: 12 blocks of 16 tokens = 192 tokens, 0.10 MiB; 1.0 requests of 192 tokens at once",
                "max_model_len is cut from 400 to 192, which is what the 12 blocks of the KV cache hold",
                "ready: at most 192 tokens a request, 2 requests at once",
            ],
        ),
    ],
)
def test_the_log_says_what_fits(
    directory: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, object], step: str, lines: list[str]
) -> None:
    with caplog.at_level(logging.INFO, "nereid"):
        Bench(directory, dtype="float32", **settings).engine.shutdown(0.0)
    assert [record.getMessage() for record in caplog.records if record.name == "nereid.build"] == lines
    (measured,) = [record.getMessage() for record in caplog.records if record.name == "nereid.profiling"]
    assert f"a step of {step} takes" in measured and "tokens/s" in measured


@pytest.mark.parametrize("pool", [True, False], ids=["by the pool", "by the setting"])
def test_what_is_over_the_limit_is_refused_at_once_and_those_behind_go_on(directory: Path, pool: bool) -> None:
    """At the limit less one there is room for one token, whatever was asked for."""
    limit = 48
    settings = {"num_blocks": 13, "max_model_len": 400} if pool else {"num_blocks": 60, "max_model_len": limit}
    bench = Bench(directory, block_size=4, **settings)
    assert bench.engine.max_model_len == limit
    lengths = [limit - 2, limit - 1, limit, limit + 1, limit * 5, 511, 512, 513]
    for index, length in enumerate(lengths):
        for max_tokens in (1, 2):
            request_id = 4 * index + 2 * (max_tokens - 1)
            bench.submit(request_id, prompt_len=length, max_tokens=max_tokens, salt=f"long {request_id}")
            bench.submit(request_id + 1, prompt_len=3, max_tokens=3, salt=f"short {request_id}")
    ends = bench.outputs.wait_for(*range(4 * len(lengths)))
    for index, length in enumerate(lengths):
        for max_tokens in (1, 2):
            request_id = 4 * index + 2 * (max_tokens - 1)
            end, behind = ends[request_id], ends[request_id + 1]
            assert behind.finish_reason is FinishReason.LENGTH and bench.outputs.counts[request_id + 1] == 3
            if length < limit:
                assert end.finish_reason is FinishReason.LENGTH
                assert bench.outputs.counts[request_id] == min(max_tokens, limit - length)
            else:
                assert end.failure is not None and end.failure.code is ErrorCode.INVALID_ARGUMENT
                assert f"got {length} tokens; allowed: at most {limit - 1} tokens" in end.failure.message
    bench.wait_until_empty()
    assert bench.engine.alive
    bench.engine.shutdown(0.0)
