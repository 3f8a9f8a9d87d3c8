"""From a Guide's source to the grammar that the library reads. Pure functions, no state.

Invariant: nothing is fetched: a schema that refers to another document is refused, and so is every source that
`limits` does not let through.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from nereid.guided.ebnf import in_own_words, is_ebnf, to_lark
from nereid.guided.limits import SourceError, check_expression, check_lark, check_length, check_schema, check_text
from nereid.request import Guide, GuideKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between two tokens of JSON: nothing, one blank, or a line break and an indentation. The library's own default takes
# white space without end, which small models then write. A schema's "x-guidance" may say otherwise.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,24}"}
_ANY_OBJECT = '{"type": "object"}'
_SPECIAL = re.compile(r"[][\\.^$|?*+(){}]")  # no others: escaped, < and > are edges of words


def to_grammar(guide: Guide) -> str:
    """The library's own form of `guide`. Raises SourceError; more errors come when the grammar is compiled."""
    check_length(guide.source)
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return _of_schema(guide.source)
        case GuideKind.JSON_OBJECT:
            return _of_schema(_ANY_OBJECT)
        case GuideKind.REGEX:
            check_expression(guide.source)
            return LLMatcher.grammar_from_regex(_without_anchors(guide.source))
        case GuideKind.GRAMMAR:
            lark = to_lark(guide.source) if is_ebnf(guide.source) else guide.source
            check_lark(lark)
            return LLMatcher.grammar_from_lark(lark)
        case GuideKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in _texts(guide)))


def own_words(guide: Guide, reason: str) -> str:
    """What the library says of `guide` in its own form, said of what the client wrote."""
    if guide.kind is GuideKind.GRAMMAR and is_ebnf(guide.source):
        return in_own_words(reason, guide.source)
    return reason


def _of_schema(source: str) -> str:
    schema = _parsed(source)
    if not isinstance(schema, dict):
        raise SourceError("a schema is a JSON object")
    check_schema(schema)
    return LLMatcher.grammar_from_json_schema(source, defaults=_JSON_OPTIONS)


def _texts(guide: Guide) -> list[str]:
    texts = _parsed(guide.source)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise SourceError("choices are a JSON list of texts, at least one, none of them empty")
    for text in texts:
        check_text(text)
    return texts


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"it is no JSON: {error}") from error


def _without_anchors(expression: str) -> str:
    """An output matches as a whole, so that ^ and $ at the ends say nothing new; the library knows neither."""
    if expression.startswith("^"):
        expression = expression[1:]
    body = expression.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return expression if escaped else body
