"""Quantised weights are made once: a later load takes what is kept, with the same bits, or makes them anew."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from nereid.models.weight_store import WeightStore
from tests.engine.test_quantised import BITS, GROUP, first_logits

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"quantization": "int4", "quantization_group_size": GROUP}
TOOK, MADE = "took the weights that", "keeps weights in"
pytestmark = pytest.mark.usefixtures("own_cache")


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "weights").rglob("*.safetensors"))


@pytest.fixture
def only(own_cache: Path, directory: Path) -> tuple[Path, torch.Tensor]:
    """The one file that is kept, and the logits that its weights give."""
    logits = first_logits(directory, **SETTINGS)
    (path,) = kept(own_cache)
    return path, logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", list(BITS))
def test_a_second_load_takes_what_is_kept_and_gives_the_same_bits(
    directory: Path, own_cache: Path, caplog: pytest.LogCaptureFixture, quantization: str, dtype: str
) -> None:
    settings = {**SETTINGS, "quantization": quantization, "dtype": dtype}
    with caplog.at_level(logging.INFO):
        made = first_logits(directory, **settings)
        (path,) = kept(own_cache)
        assert MADE in caplog.text and TOOK not in caplog.text
        before = path.stat().st_ino, path.read_bytes()
        caplog.clear()
        taken = first_logits(directory, **settings)
    assert torch.equal(taken, made)
    assert TOOK in caplog.text and MADE not in caplog.text
    assert kept(own_cache) == [path] and (path.stat().st_ino, path.read_bytes()) == before


def test_what_is_kept_is_what_is_computed_with(
    directory: Path, own_cache: Path, only: tuple[Path, torch.Tensor]
) -> None:
    path, logits = only
    tensors = safetensors.torch.load_file(path)
    scales = [name for name in tensors if name.endswith(".scales")]
    WeightStore(own_cache / "weights", path.stem).save({**tensors, scales[0]: tensors[scales[0]] * 2})
    assert not torch.allclose(first_logits(directory, **SETTINGS), logits)


def flipped(offset: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = offset % len(data)
        return data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :]

    return flip


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte of the header": flipped(40),
    "the last byte": flipped(-1),
    "cut by one byte": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "another file's": lambda data: safetensors.torch.save({"weight": torch.ones(3)}),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_made_anew(
    directory: Path, only: tuple[Path, torch.Tensor], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path, logits = only
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert torch.equal(first_logits(directory, **SETTINGS), logits)
    assert f"{path} is not used, and its weights are made anew: " in caplog.text
    assert path.read_bytes() == whole
    with caplog.at_level(logging.INFO):
        caplog.clear()
        assert torch.equal(first_logits(directory, **SETTINGS), logits)
    assert TOOK in caplog.text


def test_weights_of_another_shape_are_made_anew(
    directory: Path, own_cache: Path, only: tuple[Path, torch.Tensor]
) -> None:
    """Where a family came to keep others, in another order, and nobody raised a revision."""
    path, logits = only
    whole = path.read_bytes()
    tensors = safetensors.torch.load_file(path)
    WeightStore(own_cache / "weights", path.stem).save({f"1{name}": tensor for name, tensor in tensors.items()})
    assert torch.equal(first_logits(directory, **SETTINGS), logits)
    assert path.read_bytes() == whole


def test_each_model_and_each_setting_has_a_file_of_its_own(directory: Path, own_cache: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))  # in other bytes
    for change in ({}, {"quantization": "int8"}, {"quantization_group_size": 32}, {"dtype": "bfloat16"}):
        first_logits(directory, **{**SETTINGS, **change})
    assert len(kept(own_cache)) == 4
    first_logits(other, **SETTINGS)
    assert len(kept(own_cache)) == 5
    first_logits(Path(shutil.copytree(directory, tmp_path / "elsewhere")), **SETTINGS)
    assert len(kept(own_cache)) == 5


def test_without_a_folder_to_keep_them_in_a_load_goes_on(
    directory: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logits = first_logits(directory, **SETTINGS)
    shutil.rmtree(own_cache / "weights")
    (own_cache / "weights").write_text("no folder")
    assert torch.equal(first_logits(directory, **SETTINGS), logits)
    assert f"since {own_cache / 'weights'} cannot be used" in caplog.text


def test_two_processes_at_once_load_the_same_and_leave_one_file(
    directory: Path, own_cache: Path, only: tuple[Path, torch.Tensor]
) -> None:
    path, logits = only
    whole = path.read_bytes()
    path.unlink()
    script = f"""
import sys, torch
from pathlib import Path
from tests.engine.test_quantised import first_logits
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
torch.save(first_logits(Path(sys.argv[1]), **{SETTINGS!r}), sys.argv[2])
"""
    results = [own_cache / f"logits{index}" for index in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(directory), str(result)], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for result in results
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            process.communicate(timeout=240)
            assert process.returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)
    assert all(torch.equal(torch.load(result), logits) for result in results)
    assert [p for p in (own_cache / "weights").rglob("*") if p.is_file()] == [path]
    assert path.read_bytes() == whole
