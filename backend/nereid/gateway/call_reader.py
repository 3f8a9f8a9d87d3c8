"""CallReader: one call of a tool, read character by character from the JSON object that a model writes. Pure.

The object holds `name`, and `arguments` or `parameters`. A call is announced as soon as its name is known and the
object of its arguments has begun; from there its arguments are handed out as they are written. Until then nothing is
promised: what turns out to be no call of a declared tool is given back as the text that it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

from pydantic_core import from_json

# Everything up to where an object of arguments begins, and a name before it. It is tried at each part of an answer: so
# it must not look at much.
_HEAD_NAME = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.){0,128}")'
_HEAD = re.compile(_HEAD_NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# A head that is cut, but whose name is whole.
_CUT_HEAD = re.compile(_HEAD_NAME + r'\s*(?:,\s*(?:"[a-z]*(?:"\s*(?::\s*)?)?)?)?\Z')
_FIRST_KEY = re.compile(r'\s*\{\s*"(?P<key>[^"\\]*)"')
_BEGINNING = re.compile(r'\s*(?:\{\s*(?:"[^"\\]*"?)?)?$')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. number: how many calls came before it."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which together spell a JSON object."""

    number: int
    part: str


Event = Text | CallStart | CallArguments


class _State(Enum):
    HEAD = auto()  # nothing is promised yet
    ARGUMENTS = auto()
    TAIL = auto()  # between the end of the arguments and that of the call
    FURTHER_KEYS = auto()  # there, and it has more keys, which mean nothing
    DONE = auto()
    NO_CALL = auto()


class CallReader:
    """Fed until `ended`; then `rest` is what it was fed beyond its call, or all of it where there was no call."""

    def __init__(self, names: Set[str], number: int) -> None:
        """names: of the declared tools.  number: how many calls came before this one."""
        self._names = names
        self._number = number
        self._state = _State.HEAD
        self._raw = ""
        self._whole_scan, self._scan, self._tail = _Scan(), _Scan(), _Scan(depth=1)
        self.rest = ""

    @property
    def ended(self) -> bool:
        return self._state in (_State.DONE, _State.NO_CALL)

    @property
    def is_call(self) -> bool:
        """Whether a call was announced or read."""
        return self._state not in (_State.HEAD, _State.NO_CALL)

    def feed(self, text: str) -> list[Event]:
        """What `text` tells, which may be nothing yet."""
        if self._state is not _State.HEAD:
            return self._go_on(text)
        self._raw += text
        if match := _HEAD.match(self._raw):
            name = _name_in(match["name"])
            if name not in self._names:
                return self._give_up()
            head_end, self._state = match.end(), _State.ARGUMENTS
            return [CallStart(self._number, name), *self._go_on(self._raw[head_end:])]
        if not self._may_become_call():
            return self._give_up()
        end = self._whole_scan.end_of_object(text)
        return self._whole(len(self._raw) - len(text) + end) if end is not None else []

    def finish(self, *, forced: bool = False) -> list[Event]:
        """No more text will come. forced: it can be nothing but a call: one whose name is whole is announced."""
        if self._state is not _State.HEAD:
            self._state = self._state if self.ended else _State.DONE
            return []
        cut = _CUT_HEAD.match(self._raw) if forced else None
        if cut is None or (name := _name_in(cut["name"])) not in self._names:
            return self._give_up()
        self._state = _State.DONE
        return [CallStart(self._number, name)]

    def _may_become_call(self) -> bool:
        first = _FIRST_KEY.match(self._raw)
        return first["key"] in _KEYS if first else bool(_BEGINNING.match(self._raw))

    def _whole(self, end: int) -> list[Event]:
        """A complete object in another order, or with other keys between."""
        call = _call_in(self._raw[:end])
        if call is None or call[0] not in self._names:
            return self._give_up()
        self._state, self.rest = _State.DONE, self._raw[end:]
        return [CallStart(self._number, call[0]), CallArguments(self._number, call[1])]

    def _give_up(self) -> list[Event]:
        self._state, self.rest = _State.NO_CALL, self._raw
        return []

    def _go_on(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.ARGUMENTS:
            end = self._scan.end_of_object(text)
            part, text = (text, "") if end is None else (text[:end], text[end:])
            self._state = _State.ARGUMENTS if end is None else _State.TAIL
            events = [CallArguments(self._number, part)] if part else []
        if self._state is _State.TAIL and (stripped := text.lstrip()):
            text, self._state = stripped, _State.FURTHER_KEYS if stripped[0] == "," else _State.DONE
            self.rest = stripped.removeprefix("}")
        if self._state is _State.FURTHER_KEYS and (end := self._tail.end_of_object(text)) is not None:
            self._state, self.rest = _State.DONE, text[end:]
        return events


class _Scan:
    """Finds the end of an object in text that comes in parts."""

    def __init__(self, depth: int = 0) -> None:
        """depth: how many brackets are open already."""
        self._depth = depth
        self._in_string = self._escaped = False

    def end_of_object(self, text: str) -> int | None:
        """How many characters of `text`, which goes on where the last one ended, belong to it; None: all, and more."""
        for index, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def _name_in(quoted: str) -> str:
    return str(_parsed(quoted))


def _call_in(text: str) -> tuple[str, str] | None:
    """Name and arguments (JSON of an object) of the call that `text` spells; None where it spells none."""
    call = _parsed(text)
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters")) or {}
    if isinstance(arguments, str):  # the object, spelled in a text
        return (name, arguments) if isinstance(_parsed(arguments), dict) else None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _parsed(text: str) -> object:
    try:
        value: object = from_json(text)
    except ValueError:
        return None
    return value
