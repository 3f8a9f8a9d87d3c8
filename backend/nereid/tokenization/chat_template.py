"""ChatTemplate: messages -> the prompt that a model was trained to answer. Owns a compiled Jinja template.

The template comes with the model and is not trusted: it runs in Jinja's sandbox and can change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nereid.errors import InvalidRequestError, ModelLoadError


class ChatTemplate:
    """The template of a Hugging Face directory: chat_template.jinja, or `chat_template` in tokenizer_config.json."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelLoadError where the directory has no template that compiles."""
        path, own_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        try:
            config = json.loads(path.read_text("utf-8"))
            source = own_file.read_text("utf-8") if own_file.exists() else config["chat_template"]
            self._template = _environment().from_string(source)
        except (OSError, ValueError, KeyError, TypeError, jinja2.TemplateError) as error:
            raise ModelLoadError(f"{path}: no usable chat_template: {type(error).__name__}: {error}") from error
        self._special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` (each with `role` and `content`), up to where the assistant begins.

        Raises InvalidRequestError where the template refuses them.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequestError(f"messages: the model's chat template refuses them: {error}") from error


def _content(token: object) -> str:
    """A special token as text: transformers writes it plain, or as an object with its content."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
