"""Detokenizer: the text that a request's tokens have made certain so far. One object a request.

A token may end inside a character; the character is given out once it is whole. Invariants: what was given out never
changes; the texts given out, joined, are what the full sequence decodes to after its prompt (byte-fallback tokens by
the rules of UTF-8: one broken byte does not spoil the characters before it).
"""

from __future__ import annotations

import codecs
from os.path import commonprefix

from nereid.tokenization.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # how the bytes of an incomplete character decode, at the end of a text
# A token's text depends on at most a few before it: a character has four bytes, and some tokenizers
# show the space before a word only where something stands before it.
_CONTEXT_TOKENS = 8
_LONGEST_WINDOW = 32


class Detokenizer:
    """Decodes a window over the last tokens, so that a token costs the same at any length.

    A run of byte-fallback tokens is decoded here, since the library decodes such a run whole or not at all.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: tuple[int, ...], *, show_control_tokens: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._show_control_tokens = show_control_tokens
        self._window = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if self._is_shown(i)]
        self._shown = self._decode(self._window)  # how much of the window's text is the prompt's or given out
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_run = False  # the window ends in byte-fallback tokens, which are in `_utf8`
        for token_id in self._window:
            self._take_byte(token_id)

    def append(self, token_id: int) -> str:
        """The text that this token makes certain; empty while a character is incomplete."""
        if not self._is_shown(token_id):
            return ""
        if self._tokenizer.byte_of(token_id) is not None:
            self._window.append(token_id)
            return self._take_byte(token_id)
        before = self._end_run()
        self._window.append(token_id)
        text = self._decode(self._window)
        new = self._give_out(text, text.removesuffix(_INCOMPLETE))
        if len(self._window) > _LONGEST_WINDOW:
            del self._window[:-_CONTEXT_TOKENS]
            self._shown = self._decode(self._window).removesuffix(_INCOMPLETE)
        return before + new

    def flush(self) -> str:
        """What is still held back, shown as it is: an incomplete character becomes U+FFFD."""
        before = self._end_run()
        text = self._decode(self._window)
        return before + self._give_out(text, text)

    def _is_shown(self, token_id: int) -> bool:
        return self._tokenizer.is_shown(token_id, control_tokens=self._show_control_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, control_tokens=self._show_control_tokens)

    def _take_byte(self, token_id: int) -> str:
        """The characters that a byte-fallback token completes; any other token ends the run."""
        byte = self._tokenizer.byte_of(token_id)
        self._in_run = byte is not None
        if byte is None:
            self._utf8.reset()
            return ""
        return self._utf8.decode(bytes([byte]))

    def _end_run(self) -> str:
        """What the run of bytes before this leaves; its tokens are context from now on."""
        if not self._in_run:
            return ""
        self._in_run = False
        self._shown = self._decode(self._window)
        return self._utf8.decode(b"", final=True)

    def _give_out(self, text: str, certain: str) -> str:
        # Where the prompt ended inside a character, its U+FFFD gives way to the whole character: the common prefix.
        start = len(self._shown) if text.startswith(self._shown) else len(commonprefix((self._shown, text)))
        if len(certain) <= start:
            return ""
        self._shown = certain
        return certain[start:]
