"""Prompts: a text, token ids or chat messages -> the token ids that the engine takes, and the text to echo.

PromptReader owns nothing that changes. `check` is quick and comes first; `encode` may take long, and only it can say
how many tokens a text has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid.errors import InvalidRequestError
from nereid.server.messages import read_conversation, size_of
from nereid.server.parameters import Limits, check_ids
from nereid.server.readers import parse_json
from nereid.tokenization.chat_encoder import ChatEncoder
from nereid.tokenization.tokenizer import Tokenizer

_KINDS = ("text_input", "input_ids", "messages")
_ONLY_WITH_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
# A JSON text spells a character in up to twelve; what surrounds the contents is little beside that.
_JSON_CHARS = 12
_ROOM = 1 << 16
# How much longer than the context a text may be that is cut to its end.
_CUT_FACTOR = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that has been checked but for its length in tokens.

    field: where it comes from.  value: a text, a tuple of ids, or the fields of a conversation.  size: in characters,
    about: how long encoding takes.  keep: so many of the last tokens; None keeps all.
    """

    field: str
    value: Any
    size: int
    keep: int | None


class PromptReader:
    """Checks and encodes the prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatEncoder | None, limits: Limits, max_model_len: int) -> None:
        """chat: None where the model has no chat template.  max_model_len: in tokens."""
        self._tokenizer = tokenizer
        self._chat = chat
        self._limits = limits
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * tokenizer.longest_token

    def check(self, fields: Mapping[str, Any]) -> Prompt:
        """The one prompt of a request. Raises InvalidRequestError."""
        given = [kind for kind in _KINDS if kind in fields]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise InvalidRequestError(f"{', '.join(_KINDS)}: got {got}; allowed: exactly one of the three")
        (kind,) = given
        for name in _ONLY_WITH_MESSAGES:
            if name in fields and kind != "messages":
                raise InvalidRequestError.of_field(name, fields[name], "only with messages")
        keep = fields.get("truncate_prompt_tokens")
        keep = self._max_model_len - 1 if keep == -1 else keep
        if kind == "input_ids":
            return Prompt(kind, self._checked_ids(fields, keep), 0, keep)
        return self._checked_text(kind, fields, keep)

    def _checked_text(self, kind: str, fields: Mapping[str, Any], keep: int | None) -> Prompt:
        value = fields if kind == "messages" else fields[kind]
        size = sum(size_of(fields[name]) for name in (kind, *_ONLY_WITH_MESSAGES) if name in fields)
        most = self._most_chars(keep)
        most = most if kind == "text_input" else most * _JSON_CHARS + _ROOM
        if size > most:
            limit = f"at most {most} characters; max_model_len is {self._max_model_len} tokens"
            raise InvalidRequestError(f"{kind}: got {size} characters; allowed: {limit}")
        if kind == "messages" and self._chat is None:
            raise InvalidRequestError("messages: got some; allowed: none, since this model has no chat template")
        return Prompt(kind, value, size, keep)

    def _most_chars(self, keep: int | None) -> int:
        """No text of more characters fits the context (or, where it is cut to its end, is worth encoding)."""
        return self._max_chars * (1 if keep is None else _CUT_FACTOR)

    def _checked_ids(self, fields: Mapping[str, Any], keep: int | None) -> tuple[int, ...]:
        ids = fields["input_ids"]
        found = parse_json("input_ids", ids, "a list of token ids") if isinstance(ids, str) else ids
        if not isinstance(found, list):
            raise InvalidRequestError.of_field("input_ids", ids, "a list of token ids")
        length = fields.get("input_lengths", len(found))
        if length != len(found):
            raise InvalidRequestError.of_field("input_lengths", length, f"the number of input_ids, {len(found)}")
        found = found if keep is None else found[-keep:]
        self._check_length("input_ids", len(found))
        for token_id in found:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError.of_field("input_ids", token_id, "whole numbers")
        check_ids("input_ids", found, self._limits)
        return tuple(found)

    def encode(self, prompt: Prompt, *, echo: bool) -> tuple[tuple[int, ...], str]:
        """The prompt's ids, and its text where it is to be echoed. Raises InvalidRequestError."""
        if prompt.field == "input_ids":
            return prompt.value, self._tokenizer.decode(prompt.value) if echo else ""
        text, token_ids = self._encoded(prompt)
        if prompt.keep is not None and len(token_ids) > prompt.keep:
            token_ids = token_ids[-prompt.keep :]
            text = self._tokenizer.decode(token_ids, control_tokens=True) if echo else ""
        self._check_length(prompt.field, len(token_ids))
        # A tokenizer may know more tokens than the model was given (an added padding token, say).
        if (largest := max(token_ids)) >= self._limits.vocab_size:
            token = f"{self._tokenizer.name_of(largest)!r} (id {largest})"
            allowed = f"tokens of the model's vocabulary, ids 0 to {self._limits.vocab_size - 1}"
            raise InvalidRequestError(f"{prompt.field}: got the token {token}; allowed: {allowed}")
        return token_ids, text if echo else ""

    def _encoded(self, prompt: Prompt) -> tuple[str, tuple[int, ...]]:
        if prompt.field == "text_input":
            return prompt.value, self._tokenizer.encode(prompt.value)
        assert self._chat is not None  # checked
        return self._chat.encode(read_conversation(prompt.value), self._most_chars(prompt.keep))

    def _check_length(self, field: str, length: int) -> None:
        if length < 1:
            raise InvalidRequestError(f"{field}: got a prompt without tokens; allowed: at least one token")
        if length >= self._max_model_len:
            most = f"{self._max_model_len - 1} tokens (max_model_len {self._max_model_len}, output included)"
            raise InvalidRequestError(f"{field}: got a prompt of {length} tokens; allowed: at most {most}")
