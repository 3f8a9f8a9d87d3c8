"""ChatEncoder: a conversation -> token ids. Joins the chat template and the tokenizers.

Invariant: control tokens come from the template alone. What a message, a tool or a variable says stays text, though it
spell a control token; such spellings are marked before the template renders them, by a character that the conversation
does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereid.errors import InvalidRequestError
from nereid.tokenization.chat_template import ChatTemplate, Message, unused_character
from nereid.tokenization.literal_tokenizer import LiteralTokenizer
from nereid.tokenization.tokenizer import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders. messages: at least one, each content a text."""

    messages: Sequence[Message]
    tools: Sequence[object] | None = None
    variables: Mapping[str, object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatEncoder:
    """For any thread."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, literal: LiteralTokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._literal = literal

    def encode(self, conversation: Conversation, max_chars: int) -> tuple[str, tuple[int, ...]]:
        """The prompt as text, and its ids. Raises InvalidRequestError where the template refuses the conversation, and
        for a prompt of over `max_chars`."""
        mark = unused_character((conversation.messages, conversation.tools, conversation.variables), _PRIVATE_USE)
        marked = self._marked(conversation, mark)
        rendered = self._template.render(
            marked.messages,
            add_generation_prompt=marked.add_generation_prompt,
            continue_final_message=marked.continue_final_message,
            tools=marked.tools,
            variables=marked.variables,
        )
        if len(rendered) > max_chars:
            message = f"messages: got a prompt of {len(rendered)} characters; allowed: at most {max_chars}"
            raise InvalidRequestError(message)
        if mark not in rendered:
            return rendered, self._tokenizer.encode(rendered, field="messages", complete=True)
        try:
            return rendered.replace(mark, ""), self._literal.encode_marked(rendered, mark)
        except (UnicodeEncodeError, TypeError) as error:  # the library's, of a batch
            allowed = "Unicode text without lone surrogates"
            raise InvalidRequestError.of_field("messages", rendered, allowed) from error

    def _marked(self, conversation: Conversation, mark: str) -> Conversation:
        def with_marks(value: Any) -> Any:
            if isinstance(value, str):
                return self._literal.mark(value, mark)
            if isinstance(value, Mapping):
                return {with_marks(key): with_marks(item) for key, item in value.items()}
            return [with_marks(item) for item in value] if isinstance(value, (list, tuple)) else value

        return replace(
            conversation,
            messages=with_marks(conversation.messages),
            tools=with_marks(conversation.tools),
            variables=with_marks(conversation.variables),
        )
