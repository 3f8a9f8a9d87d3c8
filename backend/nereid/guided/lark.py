"""What a Lark grammar holds: how large its terminals are, once all that they refer to is written out; the JSON schemas
that it embeds; whether it names tokens.

A terminal (its name is in capitals) becomes one regular expression, whose size is what the library's work depends on;
a rule does not. Literals and expressions inside rules are terminals without a name: they are listed by their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Literals, regular expressions and comments: what stands in them is no operator and no name.
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"i?|/(?![/*])(?:[^/\\\n]|\\.)+/[a-z]*|//[^\n]*|#[^\n]*')
_DEFINITION = re.compile(r"(?m)^[ \t]*[?!]*(\w+)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:")
_TERMINAL_NAME = re.compile(r"\b_*[A-Z][A-Z0-9_]*\b")
_REPEATS = re.compile(r"[*+?{]")
_EMBEDDED = "%json"
_PIECE = re.compile(f"{_TEXT.pattern}|{_EMBEDDED}")
_TOKEN_NAME = re.compile(r"<[^\n>]{0,40}>?")
_SPACE = re.compile(r"\s*")
_ENOUGH = 1 << 30  # sizes stop growing here: doubling makes them astronomic


@dataclass(frozen=True, slots=True)
class Terminal:
    """Sizes with all that is referred to written out."""

    num_chars: int = 0
    num_repeats: int = 0
    num_intersections: int = 0

    def __add__(self, other: Terminal) -> Terminal:
        return Terminal(
            min(self.num_chars + other.num_chars, _ENOUGH),
            min(self.num_repeats + other.num_repeats, _ENOUGH),
            min(self.num_intersections + other.num_intersections, _ENOUGH),
        )


def without_schemas(grammar: str) -> tuple[str, list[Mapping[str, Any]]]:
    """The grammar with `{}` for each JSON object that follows a %json, and these objects, read as JSON.

    One that Python does not read is left where it is: what the library takes, Python reads. Raises RecursionError
    where one is nested too deeply.
    """
    decoder = json.JSONDecoder()
    kept: list[str] = []
    schemas: list[Mapping[str, Any]] = []
    position = start = 0
    while match := _PIECE.search(grammar, position):
        position = match.end()
        if match.group() == _EMBEDDED:
            begin = _SPACE.match(grammar, position).end()  # type: ignore[union-attr]  # it matches everywhere
            try:
                schema, end = decoder.raw_decode(grammar, begin)
            except ValueError:
                continue
            if isinstance(schema, dict):
                schemas.append(schema)
                kept += [grammar[start:position], " {}"]
                position = start = end
    return "".join(kept) + grammar[start:], schemas


def token_name(grammar: str) -> str | None:
    """The first token that a grammar without schemas names (`<|im_end|>`, `<[1-5]>`), and not in a text."""
    found = _TOKEN_NAME.search(_TEXT.sub(" ", grammar))
    return found.group() if found else None


def terminals(grammar: str) -> dict[str, Terminal]:
    """By name, or by their beginning where they have none. What refers to itself is the library's to refuse."""
    found = [match.group() for match in _TEXT.finditer(grammar)]
    texts = [text for text in found if not text.startswith(("#", "//"))]
    sizes = {text[:20]: Terminal() for text in texts}
    for text in texts:
        size = Terminal(len(text), len(_REPEATS.findall(text)) if text[0] == "/" else 0)
        sizes[text[:20]] = max(sizes[text[:20]], size, key=lambda each: (each.num_chars, each.num_repeats))
    bodies = _bodies(grammar)
    for name in _in_order(bodies):
        own, references = bodies[name]
        sizes[name] = sum((sizes.get(reference, Terminal()) for reference in references), own)
    return sizes


def _bodies(grammar: str) -> dict[str, tuple[Terminal, list[str]]]:
    """Of each terminal with a name: its own size, and the terminals that it names, each as often as it does."""
    starts = list(_DEFINITION.finditer(grammar))
    ends = [match.start() for match in starts] + [len(grammar)]
    bodies = {}
    for match, end in zip(starts, ends[1:], strict=True):
        if _TERMINAL_NAME.fullmatch(match[1]):
            body = grammar[match.end() : end]
            bare = _TEXT.sub(" ", body)
            own = Terminal(len(body), len(_REPEATS.findall(body)), bare.count("&"))
            bodies[match[1]] = (own, _TERMINAL_NAME.findall(bare))
    return bodies


def _in_order(bodies: dict[str, tuple[Terminal, list[str]]]) -> list[str]:
    """Every name after those that it refers to, without recursion, since they may go deep."""
    ordered: list[str] = []
    seen: set[str] = set()
    stack = [(name, False) for name in bodies]
    while stack:
        name, ready = stack.pop()
        if ready:
            ordered.append(name)
        elif name in bodies and name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack += [(reference, False) for reference in bodies[name][1]]
    return ordered
