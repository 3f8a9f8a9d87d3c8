"""write_tokenizer: the tokenizer inside a GGUF file -> tokenizer.json and tokenizer_config.json.

Always holds: the files are built by the `tokenizers` library from the file's own vocabulary and merges; a kind of
tokenizer whose splitting rules are not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nereid.errors import ModelLoadError
from nereid.models.gguf_metadata import Metadata, write_json


class TokenType(IntEnum):
    """What GGUF says of a vocabulary entry (only the kinds that a byte-level BPE has)."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
}


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ModelLoadError for a tokenizer that is not supported."""
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """A byte-level BPE with GGUF's vocabulary, merges and control tokens. Raises ModelLoadError."""
    metadata.require("tokenizer.ggml.model", ("gpt2",))
    split = _PRE_TOKENIZERS[metadata.require("tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS))]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found whole in a text, before any splitting."""
    unknown = sorted(set(types) - set(TokenType))
    if unknown or len(types) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.token_type: kinds {unknown} for {len(tokens)} tokens are not supported")
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        chosen = [token for token, its in zip(tokens, types, strict=True) if its == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
