"""A model runner's tiers: plans move blocks between device, host and disk; what another model stored is never taken."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nereid.batch import BlockKey, CopyBlock, GuideMasks, KVOp, LoadBlock, SchedulerOutput, StoreBlock, SwapIn, SwapOut
from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.executor import LocalExecutor
from nereid.kv_cache.block_keys import child_name, root_name
from nereid.model_config import ModelConfig
from nereid.model_runner import ModelRunner
from nereid.models import packed
from nereid_kernels.native.packing import REVISION

TOKENS = tuple(range(16))


def make_runner(model: Path, **settings: object) -> ModelRunner:
    config = EngineConfig.from_mapping({"model": str(model), "dtype": "float32", "num_blocks": 8, **settings})
    return ModelRunner(model, config, ModelConfig.load(model))


def no_masks() -> GuideMasks:
    raise AssertionError("masks were asked for")


def run(runner: ModelRunner, *ops: KVOp) -> tuple[str, ...]:
    """A plan of these operations and no tokens; which loads failed."""
    return runner.run(SchedulerOutput(1, (), (), (), ops), no_masks).failed_loads


def fill(runner: ModelRunner) -> torch.Tensor:
    """Random bits in every block; a copy of them."""
    pages = runner.kv_cache.pages
    pages.copy_(torch.randint(256, pages.shape, dtype=torch.uint8))
    return pages.clone()


def key_of(fingerprint: str, salt: str | None = None) -> BlockKey:
    root = root_name(fingerprint, salt, None)
    return BlockKey(child_name(root, TOKENS, 0), root, TOKENS, 0)


def test_a_plan_without_tokens_moves_blocks(directory: Path) -> None:
    runner = make_runner(directory)
    before = fill(runner)
    assert runner.capacity.num_host_blocks == (256 << 20) // runner.capacity.bytes_per_block
    assert run(runner, SwapOut(3, 0), CopyBlock(4, 3), SwapOut(5, 1), CopyBlock(3, 5), SwapIn(0, 6), SwapIn(1, 4)) == ()
    expected = before.clone()
    expected[3], expected[5], expected[6], expected[4] = before[4], before[4], before[3], before[5]
    assert torch.equal(runner.kv_cache.pages, expected)


def test_a_restart_finds_what_was_stored(directory: Path, tmp_path: Path) -> None:
    first = make_runner(directory, disk_cache_dir=str(tmp_path / "cache"))
    before = fill(first)
    key = key_of(first.capacity.fingerprint)
    assert run(first, SwapOut(2, 7), StoreBlock(key, 7, True)) == ()
    first.close()
    second = make_runner(directory, disk_cache_dir=str(tmp_path / "cache"))
    assert second.capacity.fingerprint == first.capacity.fingerprint
    fill(second)
    assert run(second, LoadBlock(key, 5)) == ()
    assert torch.equal(second.kv_cache.pages[5], before[2])
    second.close()


def test_a_disk_needs_no_room_on_the_host(directory: Path, tmp_path: Path) -> None:
    runner = make_runner(directory, host_cache_bytes=0, disk_cache_dir=str(tmp_path))
    assert runner.capacity.num_host_blocks == 0
    before = fill(runner)
    key = key_of(runner.capacity.fingerprint)
    assert run(runner, StoreBlock(key, 2, False), LoadBlock(key, 3), LoadBlock(key_of("", "x"), 4)) == (
        key_of("", "x").name,
    )
    assert torch.equal(runner.kv_cache.pages[2:5], before[[2, 2, 4]])
    runner.close()


def test_whatever_makes_other_kv_makes_another_fingerprint(directory: Path, tmp_path: Path) -> None:
    settings: list[dict[str, object]] = [
        {}, {"block_size": 8}, {"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8_e4m3"},
        {"deterministic": True},
    ]  # fmt: skip
    found = [fingerprint_of(directory, tmp_path, **change) for change in settings]
    models = [shutil.copytree(directory, tmp_path / f"model-{number}") for number in range(3)]
    change_weight(models[0])
    config = json.loads((models[1] / "config.json").read_text())
    (models[1] / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    (models[2] / "tokenizer.json").unlink()  # tokens are what a block is named by, however they came
    found += [fingerprint_of(model, tmp_path) for model in models]
    assert found.pop() == found[0]
    assert len(set(found)) == len(found) == 8
    assert make_runner(directory).capacity.fingerprint == ""  # nothing is kept that it would tell apart


@pytest.mark.usefixtures("own_cache")
def test_other_weights_and_another_implementation_make_another_fingerprint(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute other KV of the same tokens."""
    settings: list[dict[str, object]] = [
        {}, {"attention_backend": "cpu"}, {"quantization": "int8"}, {"quantization": "int4"},
        {"quantization": "int4", "quantization_group_size": 64},
    ]  # fmt: skip
    found = {fingerprint_of(directory, tmp_path, **change) for change in settings}
    assert len(found) == len(settings)
    assert fingerprint_of(directory, tmp_path, quantization_group_size=64) in found  # without quantization it is unused
    monkeypatch.setattr(packed, "REVISION", REVISION + 1)
    assert fingerprint_of(directory, tmp_path) in found
    assert fingerprint_of(directory, tmp_path, quantization="int4") not in found


def fingerprint_of(model: Path, folder: Path, **settings: object) -> str:
    runner = make_runner(model, disk_cache_dir=str(folder / "cache"), **settings)
    runner.close()
    return runner.capacity.fingerprint


def change_weight(model: Path) -> None:
    """One element, by one bit."""
    path = model / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 4] ^= 1
    safetensors.torch.save_file(tensors, path)


def test_another_models_block_under_the_same_name_is_not_taken(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    change_weight(other)
    runners = [make_runner(model, disk_cache_dir=str(tmp_path / "cache")) for model in (directory, other)]
    key = key_of("the same for both")
    assert run(runners[0], StoreBlock(key, 1, False)) == ()
    runners[0].close()
    before = fill(runners[1])
    assert run(runners[1], LoadBlock(key, 2)) == (key.name,)
    assert torch.equal(runners[1].kv_cache.pages, before)
    assert "it holds a block of another model, dtype or layout" in caplog.text
    runners[1].close()


def test_a_directory_that_cannot_be_used_is_refused_at_load(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^disk_cache_dir: got '.*/no/such' \(No such file or directory\); allowed"):
        make_runner(directory, disk_cache_dir=str(tmp_path / "no" / "such"))
    with pytest.raises(ConfigError, match=r"^disk_cache_bytes: got 5; allowed: at least \d+"):
        make_runner(directory, disk_cache_dir=str(tmp_path), disk_cache_bytes=5)


def test_an_executor_writes_what_waits_before_it_ends(directory: Path, tmp_path: Path) -> None:
    executor = LocalExecutor(lambda: make_runner(directory, disk_cache_dir=str(tmp_path)))
    fingerprint = executor.start().fingerprint
    keys = [key_of(fingerprint, str(salt)) for salt in range(50)]
    executor.submit(SchedulerOutput(1, (), (), (), tuple(StoreBlock(key, 1, False) for key in keys))).result(60)
    executor.shutdown()
    assert {path.stem for path in tmp_path.rglob("*.kv")} == {key.name for key in keys}


def test_the_sizes_are_in_the_log(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_runner(directory, disk_cache_dir=str(tmp_path), disk_cache_bytes=1 << 20, host_cache_bytes=1 << 20).close()
    assert f"disk: {tmp_path}, 0 blocks there, at most 1 MiB" in caplog.text
    assert "host memory: 136 blocks, 1 MiB; out at" in caplog.text
