"""Guides as clients write them -> a Guide and the name of its field, or an error that says the name. Pure functions.

A request has one guide at most, under any of the names that clients know. Whether the guide itself can be followed is
for its compiler to say, which is told the name too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nereid.errors import InvalidRequestError
from nereid.request import Guide, GuideKind
from nereid.server.readers import Reader, as_list, boolean, is_unicode, json_object, parse_json

_MAX_CHARS = 1 << 20
_TYPE, _SOURCE = "guided_decoding_guide_type", "guided_decoding_guide"
_TYPES = {
    "json": GuideKind.JSON_OBJECT,
    "json_schema": GuideKind.JSON_SCHEMA,
    "regex": GuideKind.REGEX,
    "ebnf_grammar": GuideKind.GRAMMAR,
}


@dataclass(frozen=True, slots=True)
class NamedGuide:
    """A guide and the field that holds it, under the name that the client wrote. Two are equal that guide alike."""

    name: str = field(compare=False)
    guide: Guide


def read_guide(fields: Mapping[str, Any]) -> NamedGuide | None:
    """The guide that `fields` ask for. Raises InvalidRequestError for more than one, and for what is none."""
    found: list[NamedGuide] = [fields[name] for name in GUIDE_READERS if fields.get(name) is not None]
    if (typed := _typed(fields)) is not None:
        found.append(typed)
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise InvalidRequestError(f"{names}: got {len(found)} guides; allowed: one")
    return found[0] if found else None


def _named(read: Callable[[str, object], Guide | None]) -> Reader:
    def read_named(name: str, value: object) -> NamedGuide | None:
        guide = read(name, value)
        return None if guide is None else NamedGuide(name, guide)

    return read_named


def _guided_decoding(name: str, value: object) -> Guide | None:
    given = {key: item for key, item in json_object(name, value).items() if item is not None}
    allowed = f"an object with one of {', '.join(_KINDS)}"
    if len(given) != 1:
        raise InvalidRequestError.of_field(name, value, allowed)
    ((key, item),) = given.items()
    if key not in _KINDS:
        raise InvalidRequestError.of_field(name, value, allowed)
    return _KINDS[key](f"{name}.{key}", item)


def _schema(name: str, value: object) -> Guide:
    """A schema as an object, or as the JSON text of one; true and false are schemas too."""
    found = parse_json(name, value, "a JSON schema") if isinstance(value, str) else value
    if not isinstance(found, (dict, bool)):
        raise InvalidRequestError.of_field(name, value, "a JSON schema")
    try:
        source = value if isinstance(value, str) else json.dumps(found)
    except RecursionError as error:
        raise InvalidRequestError.of_field(name, "a schema too deeply nested", "a JSON schema") from error
    return _guide(name, GuideKind.JSON_SCHEMA, source)


def _json_object(name: str, value: object) -> Guide | None:
    return Guide(GuideKind.JSON_OBJECT) if boolean(name, value) else None


def _text(kind: GuideKind) -> Callable[[str, object], Guide]:
    def read(name: str, value: object) -> Guide:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError.of_field(name, value, "a text that is not empty")
        return _guide(name, kind, value)

    return read


def _choice(name: str, value: object) -> Guide:
    choices = as_list(name, value, allowed := "a list of 1 to 1024 texts that are not empty")
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequestError.of_field(name, value, allowed)
    return _guide(name, GuideKind.CHOICE, json.dumps(choices, ensure_ascii=False))


def _response_format(name: str, value: object) -> Guide | None:
    given = json_object(name, value)
    if (kind := given.get("type")) == "text":
        return None
    if kind == "json_object":
        return Guide(GuideKind.JSON_OBJECT)
    described = given.get("json_schema")
    if kind != "json_schema" or not isinstance(described, dict) or "schema" not in described:
        allowed = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'
        raise InvalidRequestError.of_field(name, value, allowed)
    return _schema(f"{name}.json_schema.schema", described["schema"])


def _typed(fields: Mapping[str, Any]) -> NamedGuide | None:
    """TensorRT-LLM's pair of a type and a source."""
    if _TYPE not in fields:
        if _SOURCE in fields:
            raise InvalidRequestError.of_field(_SOURCE, fields[_SOURCE], f"only with {_TYPE}")
        return None
    kind = _TYPES.get(fields[_TYPE])
    if kind is None:
        raise InvalidRequestError.of_field(_TYPE, fields[_TYPE], ", ".join(_TYPES))
    if kind is GuideKind.JSON_OBJECT:
        return NamedGuide(_TYPE, Guide(kind))
    if _SOURCE not in fields:
        raise InvalidRequestError.of_field(_SOURCE, None, f"the source of a guide, for {_TYPE} {fields[_TYPE]}")
    source = fields[_SOURCE]
    read = _schema if kind is GuideKind.JSON_SCHEMA else _text(kind)
    return NamedGuide(_SOURCE, read(_SOURCE, source))


def _guide(name: str, kind: GuideKind, source: str) -> Guide:
    if len(source) > _MAX_CHARS or not is_unicode(source):
        allowed = f"at most {_MAX_CHARS} characters of Unicode"
        raise InvalidRequestError.of_field(name, f"{len(source)} characters", allowed)
    return Guide(kind, source)


_KINDS: Mapping[str, Callable[[str, object], Guide | None]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _text(GuideKind.REGEX),
    "grammar": _text(GuideKind.GRAMMAR),
    "choice": _choice,
}
# Of the fields that hold a guide by themselves; each gives a NamedGuide, or None where no guide is meant.
GUIDE_READERS: Mapping[str, Reader] = {
    "guided_decoding": _named(_guided_decoding),
    "guided_json": _named(_schema),
    "guided_regex": _named(_text(GuideKind.REGEX)),
    "guided_grammar": _named(_text(GuideKind.GRAMMAR)),
    "guided_choice": _named(_choice),
    "response_format": _named(_response_format),
}
