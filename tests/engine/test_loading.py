"""Loading safetensors: one file or shards, tied or not; every fault named with its file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from nereid.errors import ModelLoadError
from nereid.model_config import ModelConfig
from nereid.models.eager import StackedWeights
from nereid.models.registry import load_family
from nereid.request import Request, SamplingParams
from tests.engine.tiny import SteppedEngine


def load(directory: Path) -> None:
    load_family(directory, ModelConfig.load(directory), torch.float32, StackedWeights())


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def reshard(copy: Path, model: transformers.LlamaForCausalLM) -> list[Path]:
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="40KB")
    return sorted(copy.glob("model-*.safetensors"))


def rewrite(copy: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put tensors into the file, or take them out (None)."""
    path = copy / "model.safetensors"
    tensors = {**safetensors.torch.load_file(path), **changes}
    safetensors.torch.save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def set_config(copy: Path, **changes: object) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def greedy(directory: Path) -> list[int]:
    request = Request(1, (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), 0.0)
    return SteppedEngine(directory).run([request])[1]


def test_shards_load_as_one_file_does(directory: Path, copy: Path, model: transformers.LlamaForCausalLM) -> None:
    assert len(reshard(copy, model)) > 3
    assert greedy(copy) == greedy(directory)


def test_a_missing_shard_is_named(copy: Path, model: transformers.LlamaForCausalLM) -> None:
    shard = reshard(copy, model)[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(copy)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None])
def test_a_damaged_file_is_named(copy: Path, content: bytes | None) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(copy)


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="neither model.safetensors nor"):
        load(copy)


def test_a_missing_tensor_a_stray_one_and_a_wrong_shape_are_named(copy: Path, directory: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(copy, {name: None})
    with pytest.raises(ModelLoadError, match=f"tensor {name} is missing"):
        load(copy)
    shutil.copy(directory / "model.safetensors", copy)
    rewrite(copy, {"model.layers.9.bias": torch.zeros(3)})
    with pytest.raises(ModelLoadError, match=r"no use for: model\.layers\.9\.bias"):
        load(copy)
    shutil.copy(directory / "model.safetensors", copy)
    rewrite(copy, {name: torch.zeros(2, 2)})
    with pytest.raises(ModelLoadError, match=rf"tensor {name} is \[2, 2\], not \[60, 100\]"):
        load(copy)


def test_tied_embeddings_in_all_four_combinations(directory: Path, copy: Path) -> None:
    expected = greedy(directory)  # says tied, has no lm_head
    rewrite(copy, {"lm_head.weight": torch.ones(257, 60)})
    assert greedy(copy) == expected  # says tied, has one: the embedding is used
    set_config(copy, tie_word_embeddings=False)
    assert greedy(copy) != expected  # says untied, has one: it is used
    shutil.copy(directory / "model.safetensors", copy)
    with pytest.raises(ModelLoadError, match=r"tensor lm_head\.weight is missing"):
        load(copy)
