"""Tokenizer: text to token ids and back, for any thread. Owns the `tokenizers` object.

Invariant: the object is never changed after loading. Changing truncation or padding while another thread encodes is
what makes a fast tokenizer raise "Already borrowed"; both are switched off here once, and nothing can switch them on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from nereid.errors import InvalidRequestError, ModelLoadError


class Tokenizer:
    """A `tokenizer.json`, read once."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelLoadError where `directory` holds no tokenizer.json that can be read."""
        path = directory / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{path}: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes = _byte_tokens(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary), default=1)
        self._num_tokens = max(vocabulary.values(), default=-1) + 1
        self._control_ids = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._hidden_ids = frozenset(self._control_ids.values())

    @property
    def longest_token(self) -> int:
        """Most characters that one token stands for: a text of n tokens is never longer than n times this."""
        return self._longest_token

    @property
    def num_tokens(self) -> int:
        """Token ids are below this, those of added tokens too."""
        return self._num_tokens

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Control tokens: ids by spelling."""
        return self._control_ids

    def as_json(self) -> str:
        """The tokenizer as its file has it, for one who makes another of it, and for a library that reads it."""
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, text: str, *, field: str = "text_input", complete: bool = False) -> tuple[int, ...]:
        """Token ids, with what the tokenizer's own template adds (a BOS where the model has one) unless `text` is
        `complete`, as a rendered chat template is.

        The spelling of a control token in `text` becomes that token: text is taken as a finished prompt.
        Raises InvalidRequestError of `field` for text that is not Unicode (lone surrogates).
        """
        try:
            # A batch of one, since a single `encode` keeps all other threads of Python waiting (the GIL).
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=not complete)
            return tuple(encoding.ids)
        except (UnicodeEncodeError, TypeError) as error:  # the latter of a batch
            raise InvalidRequestError.of_field(field, text, "Unicode text without lone surrogates") from error

    def decode(self, token_ids: Sequence[int], *, control_tokens: bool = False) -> str:
        """The text of `token_ids`, control tokens left out or spelled; ids that name no token give no text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not control_tokens)

    def name_of(self, token_id: int) -> str | None:
        """How the token is spelled in the vocabulary; None where the id names no token."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token stands for (SentencePiece's <0xNN>); None for all others."""
        return self._bytes.get(token_id)

    def is_shown(self, token_id: int, *, control_tokens: bool = False) -> bool:
        """Whether the id can give text: it is no control token (or these are shown), and names a token at all."""
        if token_id in self._hidden_ids and not control_tokens:
            return False
        return self._tokenizer.id_to_token(token_id) is not None


def _byte_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    """Bytes by token id, where the tokenizer spells characters outside its vocabulary in bytes."""
    if "ByteFallback" not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return {}
    ids = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    return {token_id: value for value, token_id in ids.items() if token_id is not None}
