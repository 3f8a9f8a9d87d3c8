"""What a guide may ask of the library: checks of its source that are cheap, made before the library sees it.

They close what the library's own limits leave open (measured with llguidance 1.9.1): a terminal of some thousand
repeats, written out or made of others by doubling, takes minutes and gigabytes; the intersection of a dozen regular
expressions grows without bound in one operation, whatever fuel it is given; a long literal makes every mask slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from nereid.guided.lark import terminals, token_name, without_schemas

MAX_SOURCE_CHARS = 1 << 15
MAX_TERMINAL_CHARS = 4096
MAX_REPEATS = 500
MAX_INTERSECTED = 4
MAX_OPTIONAL_PROPERTIES = 400  # the library gives up where more items than 2,000 stand side by side

_REPEATS = re.compile(r"[*+?{]")
_ALL_HOLD = "allOf"
_BRANCHES = (_ALL_HOLD, "anyOf", "oneOf")
_REFERENCE = "$ref"
# They make a reference mean another place than the one that its path names.
_NOT_FOLLOWED = ("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef")
_ANNOTATIONS = ("description", "title", "$comment", "$schema", "$id")


class SourceError(Exception):
    """Why a source is refused, as a half-sentence."""


def check_length(source: str) -> None:
    """Raises SourceError."""
    if len(source) > MAX_SOURCE_CHARS:
        raise SourceError(f"it has {len(source)} characters; at most {MAX_SOURCE_CHARS} are taken")


def check_text(text: str) -> None:
    """Of a text that is taken as it stands. Raises SourceError."""
    if len(text) > MAX_TERMINAL_CHARS:
        raise SourceError(f"a text in it has {len(text)} characters; at most {MAX_TERMINAL_CHARS} are taken")


def check_expression(expression: str) -> None:
    """Of a regular expression. Raises SourceError."""
    check_text(expression)
    if len(_REPEATS.findall(expression)) > MAX_REPEATS:
        raise SourceError(f"an expression in it has more than {MAX_REPEATS} repetition operators")


def check_lark(grammar: str) -> None:
    """Of a grammar in Lark. Raises SourceError."""
    try:
        grammar, schemas = without_schemas(grammar)
    except RecursionError as error:
        raise SourceError("a schema in it is nested too deeply") from error
    for schema in schemas:
        check_schema(schema)
    if name := token_name(grammar):
        raise SourceError(f"it names the token {name}; only texts are taken")
    for name, terminal in terminals(grammar).items():
        if terminal.num_chars > MAX_TERMINAL_CHARS:
            raise SourceError(f"terminal {name} would have {terminal.num_chars} characters; at most 4096 are taken")
        if terminal.num_repeats > MAX_REPEATS:
            raise SourceError(f"terminal {name} has more than {MAX_REPEATS} repetition operators")
        if terminal.num_intersections >= MAX_INTERSECTED:
            raise SourceError(f"terminal {name} intersects more than {MAX_INTERSECTED} expressions")


def check_schema(schema: Any) -> None:
    """Of a JSON schema: of all that it holds, be it a schema or a value in one. Raises SourceError."""
    if _most_patterns(schema) > MAX_INTERSECTED:
        raise SourceError(f"allOf and $ref join more than {MAX_INTERSECTED} patterns")


def _most_patterns(document: Any) -> int:
    """A bound on the patterns that one text of the document may have to match at once.

    Each node is counted after all that it holds or refers to, without recursion, since references may go deep. One
    that refers to itself on the way adds nothing for that.
    """
    counts: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(document, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            counts[id(node)] = _count(node, document, counts)
        elif isinstance(node, (dict, list)) and id(node) not in seen:
            seen.add(id(node))
            _check_node(node)
            if isinstance(node, dict) and node is not document and isinstance(node.get("$id"), str):
                raise SourceError("it holds an $id that is not its own")
            stack.append((node, True))
            children = node if isinstance(node, list) else [*node.values(), _target(document, node)]
            stack += [(child, False) for child in children]
    return counts.get(id(document), 0)


def _check_node(node: dict[str, Any] | list[Any]) -> None:
    items: Iterable[tuple[str, Any]] = node.items() if isinstance(node, dict) else (("", value) for value in node)
    for key, value in items:
        check_expression(key)
        if key in _NOT_FOLLOWED and not isinstance(value, dict):  # a dict is the schema of a property of that name
            raise SourceError(f"{key} is not followed")
        if isinstance(value, str) and key not in _ANNOTATIONS:
            (check_expression if key == "pattern" else check_text)(value)
    properties = node.get("properties") if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(properties, dict):
        required = node.get("required")
        num_optional = len(properties) - len(required if isinstance(required, list) else [])
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            raise SourceError(f"an object has {num_optional} optional properties; at most 400 are taken")


def _count(node: dict[str, Any] | list[Any], document: Any, counts: Mapping[int, int]) -> int:
    def of(nodes: Iterable[Any]) -> list[int]:
        return [counts.get(id(child), 0) for child in nodes]

    if isinstance(node, list):
        return max(of(node), default=0)
    joined = {key: of(value) for key, value in node.items() if key in _BRANCHES and isinstance(value, list)}
    own = max(of(value for key, value in node.items() if key not in joined), default=0)
    own = max(own, int("pattern" in node or "format" in node))
    branches = sum(sum(each) if key == _ALL_HOLD else max(each, default=0) for key, each in joined.items())
    return own + branches + sum(of([_target(document, node)]))


def _target(document: Any, node: Mapping[str, Any]) -> Any:
    """What the node refers to within the document; None without a reference. Raises SourceError."""
    reference = node.get(_REFERENCE)
    if not isinstance(reference, str):
        return None
    base, _, pointer = reference.partition("#")
    if base or (pointer and not pointer.startswith("/")):
        raise SourceError(f"it refers to {reference[:80]!r}; the library does not fetch, only #/... is followed")
    found = document
    try:
        for part in unquote(pointer, errors="strict").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found[int(part)] if isinstance(found, list) else found[part]
    except (LookupError, TypeError, ValueError) as error:
        raise SourceError(f"it refers to {reference[:80]!r}, which is not in it") from error
    return found
