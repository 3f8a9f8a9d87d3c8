"""GGUF -> Hugging Face: a tiny model with known weights, and what must be refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from nereid.errors import ModelLoadError
from nereid.models.gguf import convert, from_gguf_rope_order, hf_name
from nereid.tokenization.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
TOKENS = ["<|endoftext|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ab", "12", "Ġa"]
SHAPES = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def ignore(text: str) -> None:
    """A progress that nobody reads."""


def to_gguf_rope_order(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row i and row i + head_dim / 2 of each head become neighbours, one row at a time."""
    by_head = rows.reshape(heads, HEAD_DIM, -1)
    half = HEAD_DIM // 2
    order = [row for i in range(half) for row in (i, i + half)]
    return by_head[:, order].reshape(rows.shape)


def write_gguf(path: Path, *, arch: str = "llama", pre: str = "smollm", extra: str | None = None) -> dict[str, Any]:
    """A model of one layer with random Q4_1 and fp32 tensors. Returns them de-quantized, by GGUF name."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    write_vocabulary(writer, pre)
    random = np.random.default_rng(0)
    values = {}
    for name, shape in {**SHAPES, **({extra: (HIDDEN,)} if extra else {})}.items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(random.standard_normal(shape, np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def write_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "1 2", "Ġ a"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("converted")
    source = folder.parent / "tiny.gguf"
    values = write_gguf(source)
    convert(source, folder, ignore)
    return folder, values


def test_every_weight_arrives_under_its_name_in_bf16(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, values = converted
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == {hf_name(name, "") for name in values}
    for name, value in values.items():
        if "attn_q" not in name and "attn_k" not in name:
            assert torch.equal(weights[hf_name(name, "")], torch.from_numpy(value).to(torch.bfloat16))


@pytest.mark.parametrize(("name", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_rope_order(converted: tuple[Path, dict[str, Any]], name: str, heads: int) -> None:
    folder, values = converted
    got = load_file(folder / "model.safetensors")[f"model.layers.0.self_attn.{name}_proj.weight"]
    back = to_gguf_rope_order(got.float().numpy(), heads)
    expected = torch.from_numpy(values[f"blk.0.attn_{name}.weight"]).to(torch.bfloat16).float().numpy()
    assert np.array_equal(back, expected)


def test_rope_order_is_undone_exactly() -> None:
    rows = np.arange(HEADS * HEAD_DIM * 5, dtype=np.float32).reshape(HEADS * HEAD_DIM, 5)
    assert np.array_equal(from_gguf_rope_order(to_gguf_rope_order(rows, HEADS), HEADS), rows)


def test_config(converted: tuple[Path, dict[str, Any]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text("utf-8"))
    wanted = {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 5000.0}
    assert {**config, **wanted} == config
    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["eos_token_id"]) == (len(TOKENS), 1)


def test_digits_are_split_and_control_tokens_are_whole(converted: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert tokenizer.encode("ab a12<|im_end|>").tokens == ["ab", "Ġa", "1", "2", "<|im_end|>"]
    assert tokenizer.decode([7, 9, 1], skip_special_tokens=True) == "ab a"
    settings = json.loads((converted[0] / "tokenizer_config.json").read_text("utf-8"))
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "qwen2"}, "general.architecture 'qwen2' is not supported; supported: llama"),
        ({"pre": "other"}, "tokenizer.ggml.pre 'other' is not supported; supported: gpt-2, smollm"),
        ({"extra": "rope_freqs.weight"}, "tensor rope_freqs.weight is not one of a plain Llama model"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, str], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", **change)
    with pytest.raises(ModelLoadError, match=message.replace(".", r"\.")):
        convert(tmp_path / "odd.gguf", tmp_path, ignore)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, but long enough to hold a header")
    with pytest.raises(ModelLoadError, match="not a GGUF file that can be read"):
        convert(tmp_path / "bad.gguf", tmp_path, ignore)


def test_smollm2_splits_numbers_and_the_space_before_them(smollm2_tokenizer: Tokenizer) -> None:
    # Digits come first: "   2" is three spaces and a digit, where GPT-2's rule alone gives two spaces and " 2".
    whole = smollm2_tokenizer.encode("in   2015")
    assert whole == smollm2_tokenizer.encode("in") + smollm2_tokenizer.encode("   ") + tuple(
        token for digit in "2015" for token in smollm2_tokenizer.encode(digit)
    )
