"""LiteralTokenizer: encodes text in which the spelling of a control token is text like any other. Owns a second
`tokenizers` object, made of the model's own.

In it every control token is spelled by characters that no text holds (private-use ones, drawn at random when it is
made), and keeps its id. So a prompt of real control tokens and of text that spells some is encoded in one run, with all
of the model's own rules about what stands beside a control token. Invariant: a control id comes from `encode_marked`
alone, where the spelling is whole and without a mark.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from nereid.errors import ModelLoadError
from nereid.tokenization.tokenizer import Tokenizer

_PRIVATE_PLANE = 0x100000  # the 16th: 65,534 characters for whatever use is agreed upon
_SECRET_CHARS = 8  # of 16 bits each


class LiteralTokenizer:
    """For any thread, like Tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelLoadError where the library cannot make the second tokenizer."""
        # A token of one character cannot be broken by a mark; no model's control tokens are that short.
        control = {spelling: token_id for spelling, token_id in tokenizer.control_ids.items() if len(spelling) > 1}
        secret = "".join(chr(_PRIVATE_PLANE + secrets.randbelow(0xFFFE)) for _ in range(_SECRET_CHARS))
        self._hidden = {spelling: secret + chr(_PRIVATE_PLANE + i) for i, spelling in enumerate(control)}
        self._heads = tuple({s[:i] for s in control for i in range(1, len(s)) if not s[0].isalnum()})
        self._tails = tuple({s[i:] for s in control for i in range(1, len(s)) if not s[-1].isalnum()})
        longest_first = sorted(map(re.escape, control), key=len, reverse=True)
        self._spellings = re.compile("|".join(longest_first) or r"(?!)")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_respelled(tokenizer.as_json(), self._hidden))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"tokenizer.json: its control tokens cannot be told from text: {error}") from error
        for spelling, token_id in control.items():
            if self._tokenizer.token_to_id(self._hidden[spelling]) != token_id:
                raise ModelLoadError(f"tokenizer.json: the control token {spelling!r} has no id of its own")

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each text, none of them a control token's."""
        return [tuple(e.ids) for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark`, a character that it does not hold, inside every spelling of a control token; and at its
        ends, where what stands beside it in a prompt might complete one."""
        if text.endswith(self._heads):
            text += mark
        if text.startswith(self._tails):
            text = mark + text
        while (marked := self._spellings.sub(lambda m: m[0][0] + mark + m[0][1:], text)) != text:
            text = marked
        return text

    def encode_marked(self, text: str, mark: str) -> tuple[int, ...]:
        """Ids of a prompt: spellings without a mark are control tokens, and the marks are dropped."""
        hidden = self._spellings.sub(lambda m: self._hidden[m[0]], text).replace(mark, "")
        (encoding,) = self._tokenizer.encode_batch([hidden], add_special_tokens=False)
        return tuple(encoding.ids)


def _respelled(source: str, spellings: Mapping[str, str]) -> str:
    """The tokenizer's JSON with other spellings of some added tokens, in the vocabulary too."""
    described: dict[str, Any] = json.loads(source)
    for token in described["added_tokens"]:
        if token["special"] and token["content"] in spellings:
            token.update(content=spellings[token["content"]], normalized=False)
    model = described["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {spellings.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    else:  # pairs of a piece and its score; the id is the place
        model["vocab"] = [[spellings.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in spellings:
        model["unk_token"] = spellings[model["unk_token"]]
    return json.dumps(described, ensure_ascii=False)
