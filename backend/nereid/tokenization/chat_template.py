"""ChatTemplate: messages -> the prompt that a model was trained to answer. Owns a compiled Jinja template.

The template comes with the model and is not trusted: it runs in Jinja's sandbox and can change nothing. It finds what
it finds in transformers' apply_chat_template, of which this gives the same text.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nereid.errors import InvalidRequestError, ModelLoadError

Message = Mapping[str, Any]

_LOG = logging.getLogger(__name__)
_TAGS = range(0xF0000, 0xFFFFE)  # for private use, and no marks of a ChatEncoder
_FOR_TOOLS = "tool_use"  # of several templates, the one for requests with tools
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template of a Hugging Face directory: chat_template.jinja, or `chat_template` in tokenizer_config.json."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelLoadError where the directory has no template that compiles."""
        path, own_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        try:
            config = json.loads(path.read_text("utf-8"))
            sources = _named(own_file.read_text("utf-8") if own_file.exists() else config["chat_template"])
            environment = _environment()
            self._without_tools = {name for name, source in sources.items() if not _reads_tools(environment, source)}
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            self._default = "default" if "default" in self._templates else next(iter(self._templates))
        except (OSError, ValueError, LookupError, TypeError, StopIteration, jinja2.TemplateError) as error:
            raise ModelLoadError(f"{path}: no usable chat_template: {type(error).__name__}: {error}") from error
        self._path = own_file if own_file.exists() else path
        self._to_warn = threading.Lock()  # taken, for good, by the first request whose tools are dropped
        self._special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[object] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages` (each with `role` and `content`), up to where the assistant begins, or with
        continue_final_message up to the end of the last content. variables: further ones for the template.

        Raises InvalidRequestError where the template refuses them.
        """
        name = _FOR_TOOLS if tools and _FOR_TOOLS in self._templates else self._default
        if tools and name in self._without_tools and self._to_warn.acquire(blocking=False):
            _LOG.warning("a request has tools, which %s does not show to the model: they have no effect", self._path)
        tag = unused_character((messages, tools, variables), _TAGS) if continue_final_message else ""
        if tag:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{tag} "}]
        given = {**self._special, **(variables or {}), "messages": messages, "tools": tools, "documents": None}
        try:
            text = self._templates[name].render(**given, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:  # its author's words, or Jinja's on what the author wrote
            raise InvalidRequestError(f"messages: the model's chat template refuses them: {error}") from error
        except Exception as error:  # a template is a program: it may raise anything
            kind = type(error).__name__
            raise InvalidRequestError(f"messages: the model's chat template fails on them ({kind})") from error
        return _cut_at(text, tag) if tag else text


def _reads_tools(environment: jinja2.Environment, source: str) -> bool:
    return "tools" in meta.find_undeclared_variables(environment.parse(source))


def unused_character(said: object, among: range) -> str:
    """A character whose code is `among` these, and that stands in no text of `said`, at any depth. Raises
    InvalidRequestError where all do."""
    used: set[str] = set()

    def look(value: object) -> None:
        if isinstance(value, str):
            used.update(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                look(key)
                look(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)

    look(said)
    for code in among:
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError(f"messages: got all {len(among)} characters for private use; allowed: fewer")


def _cut_at(text: str, tag: str) -> str:
    """`text` up to the tag at the end of the last message's content. A template that strips contents has stripped the
    blank behind the tag, too: then the content's own end is stripped here."""
    if (place := text.rfind(tag)) < 0:
        raise InvalidRequestError("continue_final_message: got true; allowed: false, since the model's chat template "
                                  "does not show the last message's content")  # fmt: skip
    return text[:place] if text.startswith(" ", place + len(tag)) else text[:place].rstrip()


def _named(source: object) -> dict[str, str]:
    """Templates by name: most models have one, some a list."""
    if isinstance(source, str):
        return {"default": source}
    if not isinstance(source, list):
        raise TypeError("neither a text nor a list of templates")
    return {str(entry["name"]): entry["template"] for entry in source}


def _content(token: object) -> str:
    """A special token as text: transformers writes it plain, or as an object with its content."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant says, for training; here its content alone counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
