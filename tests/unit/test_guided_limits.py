"""Sources that ask for too much, or for what cannot be: refused as the request's own error, in bounded time."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from nereid.errors import ErrorCode, GuideError, InvalidRequestError
from nereid.guided.compiler import GuideCompiler
from nereid.guided.lark import terminals
from nereid.request import Guide, GuideKind
from nereid.tokenization.tokenizer import Tokenizer
from tests.guides import allowed_tokens

VOCAB = 49152
BOUND_S = 20.0  # a hundred times what the slowest takes: what is not bounded takes minutes


def chain(pattern: str, last: str, count: int) -> str:
    return "\n".join(pattern.format(i, i + 1) for i in range(count)) + "\n" + last.format(count)


def deep(value: Any, count: int) -> str:
    """A JSON text nested so deep that `json` cannot write it."""
    return '{"type": "array", "items": ' * count + json.dumps(value) + "}" * count


def joined(count: int) -> list[dict[str, str]]:
    return [{"pattern": f".*a.{{{i}}}$"} for i in range(count)]


def nested_refs(count: int) -> str:
    level = '{{"items":' * 20 + '{{"$ref":"#/$defs/{1}"}}' + "}}" * 20
    defs = ",".join(f'"{i}":' + level.format(i, i + 1) for i in range(count))
    return f'{{"$ref":"#/$defs/0","$defs":{{{defs},"{count}":{{"type":"integer"}}}}}}'


def by_refs(path: str, definitions: Any, **more: Any) -> str:
    """Twenty patterns that references by `path` join."""
    refs = [{"$ref": path.format(i)} for i in range(20)]
    return json.dumps({"$defs": definitions, "type": "string", "allOf": refs, **more})


NUMBERED = {str(i): p for i, p in enumerate(joined(20))}


SCHEMA, REGEX, GRAMMAR, CHOICE = GuideKind.JSON_SCHEMA, GuideKind.REGEX, GuideKind.GRAMMAR, GuideKind.CHOICE
REFUSED: dict[str, tuple[GuideKind, str, str]] = {
    "no json": (SCHEMA, '{"type": ', "it is no JSON"),
    "no object": (SCHEMA, "[]", "a schema is a JSON object"),
    "false": (SCHEMA, "false", "a schema is a JSON object"),
    "NaN": (SCHEMA, '{"const": NaN}', "expected value"),
    "surrogate": (SCHEMA, '{"const": "\\ud800"}', "lone leading surrogate|unexpected end of hex escape"),
    "bare surrogate": (REGEX, "a\ud800", "surrogate"),
    "surrogate choice": (CHOICE, '["\\ud800"]', "surrogate"),
    "no schema": (SCHEMA, '{"type": "strng"}', "Invalid type: strng"),
    "unknown keyword": (SCHEMA, '{"not": {"type": "null"}}', "Unimplemented keys"),
    "unsatisfiable": (SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 1}', "minimum .5. is greater"),
    "itself alone": (SCHEMA, '{"$ref": "#"}', "cannot go on"),
    "of a file": (SCHEMA, '{"$ref": "file:///etc/passwd"}', "does not fetch"),
    "too long": (SCHEMA, json.dumps({"enum": [f"value {i}" for i in range(20000)]}), "at most 32768"),
    "long text": (SCHEMA, json.dumps({"const": "x" * 5000}), "at most 4096"),
    "deep": (SCHEMA, deep({}, 1000), "it is no JSON|recursion limit"),
    "optional": (SCHEMA, json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}), "optional"),
    "joined": (SCHEMA, json.dumps({"type": "string", "allOf": joined(20)}), "more than 4 patterns"),
    "joined by refs": (
        SCHEMA,
        json.dumps(
            {"$ref": "#/d/0", "d": {str(i): {**p, "$ref": f"#/d/{(i + 1) % 20}"} for i, p in enumerate(joined(20))}}
        ),
        "more than 4 patterns",
    ),
    "joined in properties": (
        SCHEMA,
        json.dumps({"allOf": [{"properties": {"allOf": p}} for p in joined(20)]}),
        "more than 4 patterns",
    ),
    "joined by indices": (SCHEMA, by_refs("#/$defs/a/{}", {"a": joined(20)}), "more than 4 patterns"),
    "joined by escapes": (SCHEMA, by_refs("#/%24d%65fs/~0~1a/{}", {"~/a": NUMBERED}), "more than 4 patterns"),
    "joined in Lark": (GRAMMAR, "start: %json " + by_refs("#/$defs/{}", NUMBERED), "more than 4 patterns"),
    "joined in Lark, spelled otherwise": (
        GRAMMAR,
        "start: x\nx: %json\n" + by_refs("#/$defs/{}", NUMBERED).replace("pattern", "p\\u0061ttern"),
        "more than 4 patterns",
    ),
    "by anchor": (SCHEMA, '{"$ref": "#a", "$defs": {"b": {"$anchor": "a"}}}', "only #/"),
    "anchor": (SCHEMA, '{"type": "array", "items": {"$anchor": "a"}}', "\\$anchor is not followed"),
    "dynamic": (SCHEMA, '{"$dynamicRef": "#/$defs/a", "$defs": {"a": {}}}', "\\$dynamicRef is not followed"),
    "nested id": (SCHEMA, '{"items": {"$id": "x", "$ref": "#/$defs/0"}, "$defs": {"0": {}}}', "an \\$id that is not"),
    "no target": (SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"b": {}}}', "is not in it"),
    "no index": (SCHEMA, '{"$ref": "#/allOf/2", "allOf": [{}, {}]}', "is not in it"),
    "no bytes": (SCHEMA, '{"$ref": "#/%ff"}', "is not in it"),
    "deep in Lark": (GRAMMAR, "start: %json " + deep({}, 1000), "too deeply|recursion limit"),
    "token": (GRAMMAR, 'start: <|im_end|> "a"', r"names the token <\|im_end\|>"),
    "tokens": (GRAMMAR, 'start: "<a>" /<b>/ <[1-5]>', r"names the token <\[1-5\]>"),
    "bad regex": (REGEX, "(", "unclosed group"),
    "lookahead": (REGEX, "(?=a)a", "look-around"),
    "back reference": (REGEX, r"(a)\1", "backreferences are not supported"),
    "empty": (REGEX, "", "the empty text alone"),
    "repeats": (REGEX, ".*" * 1000, "more than 500 repetition operators"),
    "long regex": (REGEX, "abcdefgh" * 1000, "at most 4096"),
    "fuel": (REGEX, ".?" * 499, "precomputation failed"),
    "no start": (GRAMMAR, 'other: "a"', "no start rule"),
    "garbage": (GRAMMAR, "\x00\ufffd{{{", "lexer error"),
    "parentheses": (GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    "and": (GRAMMAR, "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(9)), "intersects more than 4"),
    "doubled": (
        GRAMMAR,
        "start: A200\nA0: /.?/\n" + chain("A{1}: A{0} A{0}", "", 200),
        "would have|repetition operators",
    ),
    "doubled text": (GRAMMAR, 'start: A20\nA0: "abcdefgh"\n' + chain("A{1}: A{0} A{0}", "", 20), "would have"),
    "no root": (GRAMMAR, 'other ::= "a"', "no rule root"),
    "no ebnf": (GRAMMAR, 'root ::= "a" $ "b"', "line 1: what does"),
    "no such rule": (GRAMMAR, "root ::= foo", r"\(in the rule root: unknown name: \"foo\"\)"),
    "no such long name": (GRAMMAR, 'root ::= "a"\n | Foo-' + "X" * 60, r'rule root: unknown name: "Foo-X{60}"'),
    "a name like ours": (GRAMMAR, "root ::= b\nb ::= r_foo", r"\(in the rule b: unknown name: \"r_foo\"\)"),
    "a rule twice": (GRAMMAR, 'root ::= "a"\n\nroot ::= "b"', r"\(in the rule root: duplicate rule: \"root\"\)"),
    "open parenthesis": (
        GRAMMAR,
        'root ::= ("a" |',
        r"\(in the rule root: Expected token '\)', found the end of the rule\)",
    ),
    "closed twice": (GRAMMAR, 'root ::= x\nx ::= "a" )', r"\(in the rule x: expecting .* \(at '\)'\)\)"),
    "twice repeated": (GRAMMAR, 'root ::= "a"{2}{2}', r"\(in the rule root: Expected value \(at '{'\)\)"),
    "backwards": (GRAMMAR, 'root ::= "a"{3,1}', r"\(in the rule root: range end must be"),
    "long class": (GRAMMAR, "root ::= [" + "abc" * 300 + "]", r"the class \[abc.* names too many characters"),
    "no character": (GRAMMAR, 'root ::= "\\uD800"', "is no character"),
    "no choices": (CHOICE, "[]", "at least one"),
    "no texts": (CHOICE, "[1]", "a JSON list of texts"),
    "empty choice": (CHOICE, '["a", ""]', "none of them empty"),
}
# Each overflows a stack of usual size, or is large; the library takes it.
TAKEN: dict[str, tuple[GuideKind, str]] = {
    "rules": (GRAMMAR, "start: r0\n" + chain('r{}: "x" r{}?', 'r{}: "a"', 1800)),
    "aliases": (GRAMMAR, "start: r0\n" + chain("r{}: r{}", 'r{}: "a"', 2300)),
    "terminals": (GRAMMAR, "start: R0\n" + chain("R{}: R{}", 'R{}: "a"', 300)),
    "ebnf": (GRAMMAR, "root ::= r0\n" + chain('r{} ::= "x" r{}?', 'r{} ::= "a"', 1500)),
    "references": (SCHEMA, nested_refs(100)),
    "long strings": (SCHEMA, '{"type": "string", "minLength": 100000}'),
    "long arrays": (SCHEMA, '{"type": "array", "minItems": 1000000}'),
    "catastrophic": (REGEX, "(a*)*b|(.*a){25}"),
    "many choices": (CHOICE, json.dumps([f"v {i * 7919 % 20011}" for i in range(2500)])),
}


@pytest.fixture(scope="module")
def compiler(smollm2_tokenizer: Tokenizer) -> GuideCompiler:
    return GuideCompiler(smollm2_tokenizer, VOCAB, (2,))


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_sources_are_refused(compiler: GuideCompiler, name: str) -> None:
    kind, source, reason = REFUSED[name]
    for _ in range(2):  # the second answer comes from the cache
        start = time.monotonic()
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            compiler.compile(Guide(kind, source))
        assert time.monotonic() - start < BOUND_S
        message = str(caught.value)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert message.startswith("guided_decoding: got ") and "; allowed: a " in message
        assert len(message) < 500 and "\n" not in message


@pytest.mark.parametrize(
    ("kind", "source", "inside", "outside"),
    [
        (SCHEMA, '{"$ref": "#/$defs/a/1", "$defs": {"a": [{}, {"type": "integer"}]}}', "12", '"x"'),
        (SCHEMA, '{"properties": {"$anchor": {}, "$id": {"type": "null"}}}', '{"$id": n', '{"$id": 1'),
        (GRAMMAR, 'start: "<|im_end|>" // <x>\n | %json {"pattern": "^<[a-c]>$", "type": "string"}', '"<b>', '"<d>'),
        (GRAMMAR, 'start: %json {"required": ["pattern"], "properties": {"pattern": {"type": "integer", "title": "'
         + "long " * 900 + '"}}, "type": "object", "additionalProperties": false}', '{"pattern": 1', "{}"),
    ],
)  # fmt: skip
def test_what_looks_alike_is_taken(
    compiler: GuideCompiler, smollm2_tokenizer: Tokenizer, kind: GuideKind, source: str, inside: str, outside: str
) -> None:
    compiled = compiler.compile(Guide(kind, source))
    assert compiled.matcher().accept(smollm2_tokenizer.encode(inside))
    assert not compiled.matcher().accept(smollm2_tokenizer.encode(outside))


@pytest.mark.parametrize("name", TAKEN)
def test_large_sources_are_taken(compiler: GuideCompiler, name: str) -> None:
    start = time.monotonic()
    matcher = compiler.compile(Guide(*TAKEN[name])).matcher()
    for _ in range(5):
        allowed = allowed_tokens(matcher, VOCAB)
        if not matcher.accept(allowed[-1:]) or matcher.is_complete:
            break
    assert time.monotonic() - start < BOUND_S


def test_nothing_is_fetched(compiler: GuideCompiler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for schema in ({"$ref": url}, {"$id": url, "properties": {"a": {"$ref": "other.json"}}}, {"$schema": url}):
            try:
                compiler.compile(Guide(SCHEMA, json.dumps(schema)))
            except InvalidRequestError as error:
                assert "fetch" in str(error) or "schema" in str(error)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_grammar_that_outgrows_its_fuel_ends_its_matcher_alone(compiler: GuideCompiler) -> None:
    matcher = compiler.compile(Guide(GRAMMAR, 'start: "x" (((("a"{1,999}){1,999}){1,999}){1,999})')).matcher()
    other = compiler.compile(Guide(REGEX, "[a-z]{9}")).matcher()
    with pytest.raises(GuideError, match="the guide cannot go on: "):
        for _ in range(3000):
            allowed = allowed_tokens(matcher, VOCAB)
            assert matcher.accept(allowed[-1:])
    assert other.accept(allowed_tokens(other, VOCAB)[-1:])


def test_the_size_of_a_terminal_counts_what_it_refers_to() -> None:
    sizes = terminals('start: A b // "C"\nA: B B "xy"\nB.2: /a*/ & /b+/ # "long"\nb: B\n?c: "&"\n')
    assert sizes["B"].num_repeats == 2 and sizes["B"].num_intersections == 1
    assert sizes["A"].num_repeats == 4 and sizes["A"].num_intersections == 2
    assert sizes["A"].num_chars > 2 * sizes["B"].num_chars
    assert set(sizes) == {"A", "B", '"xy"', "/a*/", "/b+/", '"&"'}
