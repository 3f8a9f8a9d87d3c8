"""convert: a GGUF file -> a Hugging Face directory (config, bf16 safetensors, tokenizer, generation settings).

Always holds: what is not understood is refused by name, never guessed and never dropped. Weights are de-quantized one
tensor at a time, so that the peak of memory is the bf16 model and one tensor in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nereid.errors import ModelLoadError
from nereid.models.gguf_metadata import Metadata, write_json
from nereid.models.gguf_tokenizer import write_tokenizer
from nereid.paths import Progress

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_REPORTS = 10


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model of the GGUF file `source` into `folder`, which exists.

    progress: told a line about every tenth of the tensors. Raises ModelLoadError for what is not supported, OSError
    where `folder` cannot be written.
    """
    reader = _open(source)
    metadata = Metadata.of(reader, source.name)
    metadata.require("general.architecture", ("llama",))
    config = _config(metadata, reader)
    weights = dict(_weights(reader, config, source.name, progress))
    progress(f"{source.name}: writing {sum(w.nbytes for w in weights.values()) >> 20} MB of weights")
    _save(weights, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(folder / "generation_config.json", {key: config[key] for key in keys})
    write_tokenizer(metadata, folder)


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise ModelLoadError(f"{source}: not a GGUF file that can be read: {error}") from error


def _config(metadata: Metadata, reader: gguf.GGUFReader) -> dict[str, Any]:
    metadata.require("llama.rope.scaling.type", ("none",), default="none")
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    embeddings = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(metadata.get("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        # GGUF holds it in fp32: its shortest spelling is the number that was meant.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": int(embeddings.shape[1]) if embeddings is not None else int(metadata["llama.vocab_size"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _weights(
    reader: gguf.GGUFReader, config: Mapping[str, Any], file: str, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor under its Hugging Face name, in bf16."""
    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors):
        if done * _REPORTS // total != (done - 1) * _REPORTS // total:
            progress(f"{file}: converting, {done} of {total} tensors")
        yield hf_name(tensor.name, file), _dequantized(tensor, config, file)


def hf_name(name: str, file: str) -> str:
    """The Hugging Face name of the Llama tensor that GGUF calls `name`. Raises ModelLoadError for any other."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and (inner := _IN_LAYER.get(match[2])):
        return f"model.layers.{match[1]}.{inner}.weight"
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    raise ModelLoadError(f"{file}: tensor {name} is not one of a plain Llama model")


def _dequantized(tensor: gguf.ReaderTensor, config: Mapping[str, Any], file: str) -> torch.Tensor:
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(f"{file}: tensor {tensor.name}: format {tensor.tensor_type.name}: {error}") from error
    if tensor.name.endswith("attn_q.weight"):
        values = from_gguf_rope_order(values, config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        values = from_gguf_rope_order(values, config["num_key_value_heads"])
    return torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)  # a copy: the file is mapped read-only


def from_gguf_rope_order(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """GGUF turns neighbouring rows of a head together; Hugging Face turns row i with row i + head_dim / 2."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])  # [heads, head_dim / 2, 2, hidden]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _save(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(dict(weights), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(None, f"writing {path.name}: {error}") from error
    path.chmod(0o644)  # save_file writes for the owner alone, unlike everything else here
