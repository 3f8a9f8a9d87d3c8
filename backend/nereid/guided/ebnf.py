"""EBNF as llama.cpp and xgrammar write it (`root ::= ...`), turned into Lark, token by token.

Invariant: the result describes the same texts, character by character: every class stays a terminal of one character,
so that no terminal swallows what belongs to the next. Lookaheads and other extensions are refused. A refusal speaks
of the client's grammar, never of its translation.
"""

from __future__ import annotations

import json
import re

from nereid.guided.limits import MAX_REPEATS, MAX_TERMINAL_CHARS, SourceError

_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w.-]*\s*::=")
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<rule>[A-Za-z_][\w.-]*)\s*::=
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
      | (?P<mark>[|()*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = r"/(.|\n)/"
# What the library says of Lark: `2(10): why (at "*" ('+' or '*'))`, a place in line and column; the line's end as \n.
_PLACE = re.compile(r"(?:\bat )?\b(\d+)\(\d+\):")
_FOUND = re.compile(r'\s*\(at "([^"]*)" \(.*\)\)')
_END_OF_RULE = re.compile(r"'(?:\n|\\n)'")
_RULE_NAME = re.compile(r"\br_\w+")


def is_ebnf(grammar: str) -> bool:
    """Whether a line begins with `name ::=`; all other grammars are taken for Lark."""
    return _RULE.search(grammar) is not None


def to_lark(grammar: str) -> str:
    """The same grammar in Lark, beginning at the rule `root`. Raises SourceError."""
    parts: list[str] = []
    defined: set[str] = set()
    position = 0
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        if match is None:
            line = grammar.count("\n", 0, position) + 1
            raise SourceError(f"line {line}: what does {grammar[position : position + 20]!r} mean?")
        position = match.end()
        if match.lastgroup == "rule":
            defined.add(match["rule"])
        parts.append(_translated(match))
    if "root" not in defined:
        raise SourceError("it has no rule root")
    return "start: " + _rule_name("root") + "".join(parts)


def in_own_words(reason: str, grammar: str) -> str:
    """What the library says of the translation, said of `grammar`: with its names, and rules in place of lines."""
    tokens = [match for match in _TOKEN.finditer(grammar) if match.lastgroup in ("rule", "name")]
    rules = [match["rule"] for match in tokens if match.lastgroup == "rule"]  # each has a line, from the second on
    names = {_rule_name(name): name for match in tokens for name in [match["rule"] or match["name"]]}

    def place(match: re.Match[str]) -> str:
        line = int(match[1]) - 2
        return f"in the rule {rules[line]}:" if 0 <= line < len(rules) else ""

    def found(match: re.Match[str]) -> str:
        return f" (at '{match[1]}')" if len(match[1]) == 1 and match[1].isprintable() else ""

    said = _END_OF_RULE.sub("the end of the rule", _FOUND.sub(found, reason))
    said = _RULE_NAME.sub(lambda match: names.get(match[0], match[0]), said)
    return _PLACE.sub(place, said).strip()


def _translated(match: re.Match[str]) -> str:
    text = match.group()
    match match.lastgroup:
        case "space":
            return " "  # the next `name ::=` ends a rule, no line does
        case "rule":
            return f"\n{_rule_name(match['rule'])}: "
        case "name":
            return _rule_name(text) + " "
        case "text":
            return json.dumps(_plain(text[1:-1]), ensure_ascii=False) + " "
        case "class":
            return _as_class(text) + " "
        case "repeat":
            return _as_repeat(text) + " "
        case _:
            return _ANY if text == "." else text


def _rule_name(name: str) -> str:
    """A name that Lark takes for a rule, different for different names."""
    return "r_" + "".join(c if c.islower() and c.isascii() or c.isdigit() else f"_{ord(c):x}_" for c in name)


def _character(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] in "xuU" and len(escape) > 1:
        code = int(escape[1:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise SourceError(f"\\{escape} is no character")
        return chr(code)
    return _NAMED.get(escape, escape)


def _plain(text: str) -> str:
    return _ESCAPE.sub(_character, text)


def _as_class(text: str) -> str:
    """A class of characters as a regular expression: every character spelled so that it stands for itself."""
    inverted = text.startswith("[^")
    inside = text[2 if inverted else 1 : -1]
    if not inside:
        raise SourceError(f"the class {text} holds nothing")
    pieces: list[str] = []
    position = 0
    while position < len(inside):
        escape = _ESCAPE.match(inside, position)
        character = _character(escape) if escape else inside[position]
        is_range = character == "-" and not escape and 0 < position < len(inside) - 1
        pieces.append("-" if is_range else f"\\x{{{ord(character):x}}}")
        position = escape.end() if escape else position + 1
    made = f"/[{'^' if inverted else ''}{''.join(pieces)}]/"
    if len(made) > MAX_TERMINAL_CHARS or len(pieces) - pieces.count("-") > MAX_REPEATS:
        raise SourceError(f"the class {text[:20]}... names too many characters; about {MAX_REPEATS} are taken")
    return made


def _as_repeat(text: str) -> str:
    low, comma, high = (part.strip() for part in text[1:-1].partition(","))
    if not low and not high:
        raise SourceError(f"{text} gives no number")
    return f"{{{low or '0'},{high}}}" if comma else f"{{{low}}}"
