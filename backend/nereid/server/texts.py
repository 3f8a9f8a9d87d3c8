"""Texts: what a request parser needs of a model's tokenizer and chat template, put together once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid.errors import ModelLoadError
from nereid.tokenization.chat_encoder import ChatEncoder
from nereid.tokenization.chat_template import ChatTemplate
from nereid.tokenization.literal_tokenizer import LiteralTokenizer
from nereid.tokenization.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Texts:
    """chat: None where the model has no chat template that can be used."""

    tokenizer: Tokenizer
    literal: LiteralTokenizer
    chat: ChatEncoder | None

    @classmethod
    def of_model(cls, tokenizer: Tokenizer, directory: Path) -> Texts:
        """Of a model's files. Raises ModelLoadError where control tokens cannot be told from text."""
        literal = LiteralTokenizer(tokenizer)
        try:
            template = ChatTemplate(directory)
        except ModelLoadError as error:
            _LOG.warning("requests with messages will be refused: %s", error)
            return cls(tokenizer, literal, None)
        return cls(tokenizer, literal, ChatEncoder(template, tokenizer, literal))

    def spell(self, token_id: int) -> str:
        """The text of one token by itself, a control token's too."""
        return self.tokenizer.decode((token_id,), control_tokens=True)

    def word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All token sequences that spell the words, at the start of a text or after a space."""
        forms = [form for word in words for form in (word, " " + word.lstrip(" "))]
        return tuple(dict.fromkeys(ids for ids in self.literal.encode_texts(forms) if ids))
