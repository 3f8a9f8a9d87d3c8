"""What WeightStore keeps comes back bit for bit, or not at all; nothing on the disk is an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from nereid.models.weight_store import WeightStore

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER_KEY = "ab" * 32, "cd" * 32


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of every dtype that is kept; the first has an odd number of bytes, behind which floats would not be aligned."""
    torch.manual_seed(0)
    return {
        "0.codes": torch.randint(-128, 128, (1, 3, 5), dtype=torch.int8),
        "0.scales": torch.randn(1, 2, 5),
        "1.codes": torch.randint(0, 256, (2, 2), dtype=torch.uint8),
        "1.scales": torch.randn(2, 1, 2),
    }


def path_of(directory: Path, key: str) -> Path:
    return directory / key[:2] / f"{key}.safetensors"


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_kept_comes_back_in_another_store(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert WeightStore(tmp_path / "new", KEY).load() == {}
    WeightStore(tmp_path / "new", KEY).save(tensors)
    assert_equal(WeightStore(tmp_path / "new", KEY).load(), tensors)
    assert WeightStore(tmp_path / "new", OTHER_KEY).load() == {}


def test_a_file_is_a_safetensors_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    WeightStore(tmp_path, KEY).save(tensors)
    assert_equal(safetensors.torch.load_file(path_of(tmp_path, KEY)), tensors)


def test_no_byte_can_be_changed_unnoticed(
    tmp_path: Path, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    store, path = WeightStore(tmp_path, KEY), path_of(tmp_path, KEY)
    store.save(tensors)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        caplog.clear()
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert store.load() == {}, offset
        assert f"{path} is not used, and its weights are made anew: " in caplog.text


def test_a_file_of_any_other_length_is_not_used(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    store, path = WeightStore(tmp_path, KEY), path_of(tmp_path, KEY)
    store.save(tensors)
    whole = path.read_bytes()
    for cut in [whole[:length] for length in range(len(whole))] + [whole + b"\0"]:
        path.write_bytes(cut)
        assert store.load() == {}, len(cut)
    store.save(tensors)
    assert path.read_bytes() == whole


def test_a_file_of_another_key_is_not_used(
    tmp_path: Path, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    WeightStore(tmp_path, OTHER_KEY).save(tensors)
    path_of(tmp_path, KEY).parent.mkdir()
    path_of(tmp_path, OTHER_KEY).rename(path_of(tmp_path, KEY))
    assert WeightStore(tmp_path, KEY).load() == {}
    assert "made anew: it is of another key" in caplog.text


def test_those_longest_unused_give_way(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    first, second, third = "a1" * 32, "b2" * 32, "c3" * 32
    WeightStore(tmp_path, first).save(tensors)
    bound = int(path_of(tmp_path, first).stat().st_size * 2.5)
    WeightStore(tmp_path, second, bound).save(tensors)
    assert WeightStore(tmp_path, first, bound).load()  # used again, after the second was
    WeightStore(tmp_path, third, bound).save(tensors)
    assert [path_of(tmp_path, key).exists() for key in (first, second, third)] == [True, False, True]


def test_what_is_larger_than_the_bound_is_not_kept(
    tmp_path: Path, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    store = WeightStore(tmp_path, KEY, max_bytes=100)
    store.save(tensors)
    assert store.load() == {}
    assert f"weights are not kept in {path_of(tmp_path, KEY)}" in caplog.text


def test_a_directory_that_cannot_be_made_is_a_warning(
    tmp_path: Path, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    store = WeightStore(tmp_path / "file", KEY)
    store.save(tensors)
    assert store.load() == {}
    assert f"weights are made at each load, since {tmp_path / 'file'} cannot be used: " in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may write anywhere")
def test_a_directory_that_can_only_be_read_still_serves(
    tmp_path: Path, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    WeightStore(tmp_path, KEY).save(tensors)
    for folder in (tmp_path / KEY[:2], tmp_path):
        folder.chmod(0o500)
    try:
        assert_equal(WeightStore(tmp_path, KEY).load(), tensors)
        WeightStore(tmp_path, OTHER_KEY).save(tensors)
    finally:
        tmp_path.chmod(0o700)
    assert f"weights are not kept in {path_of(tmp_path, OTHER_KEY)}" in caplog.text


def test_a_write_that_fails_is_a_warning_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process that may not write files as large as that."""
    script = """
import logging, resource, sys, torch
from pathlib import Path
from nereid.models.weight_store import WeightStore
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
WeightStore(Path(sys.argv[1]), sys.argv[2]).save({"0.codes": torch.zeros(100_000, dtype=torch.int8)})
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), KEY], cwd=ROOT, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = f"weights are not kept in {path_of(tmp_path, KEY)}, so that they are made at each load: File too large"
    assert expected in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_another_processes_unfinished_file_is_removed_once_nobody_writes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = tmp_path / KEY[:2] / f".{KEY}.{'0' * 16}.partial"
    partial.parent.mkdir()
    partial.write_bytes(b"half of it")
    with caplog.at_level(logging.WARNING):
        WeightStore(tmp_path, KEY)
    assert not partial.exists() and not caplog.records
