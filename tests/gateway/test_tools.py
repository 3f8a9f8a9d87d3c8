"""Calls of tools in a model's text: both formats, malformed ones, and every way to cut a text into parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereid.gateway.call_reader import CallArguments, CallStart, Event, Text
from nereid.gateway.tool_format import ToolFormat
from nereid.gateway.tools import ToolParser

NAMES = {"get_weather", "now"}
WEATHER = '{"name": "get_weather", "arguments": {"city": "S\\u00e3o \\"P\\" {]", "days": [1, {"a": 2}]}}'
LLAMA_WEATHER = WEATHER.replace("arguments", "parameters")
ARGUMENTS = {"city": 'São "P" {]', "days": [1, {"a": 2}]}
NOW = '{"name": "now", "arguments": {}}'


@dataclass
class Read:
    """What the events of one answer add up to."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                self.text += event.text
            elif isinstance(event, CallStart):
                assert event.number == len(self.calls)
                self.calls.append((event.name, ""))
            else:
                assert isinstance(event, CallArguments) and event.number == len(self.calls) - 1
                self.calls[-1] = (self.calls[-1][0], self.calls[-1][1] + event.part)


def read(parts: list[str], tool_format: ToolFormat, *, parallel: bool = True, forced: bool = False) -> Read:
    parser, result = ToolParser(tool_format, NAMES, parallel=parallel, forced=forced), Read()
    for part in parts:
        result.add(parser.feed(part))
    result.add(parser.finish())
    assert len(result.calls) == (parser.num_calls if parallel else min(parser.num_calls, 1))
    return result


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


# Text, formats that read it, text shown, names and arguments of the calls.
CALLS = [
    (tagged(WEATHER), ("hermes", "auto"), "", [("get_weather", ARGUMENTS)]),
    (f"Look:\n\n{tagged(WEATHER, NOW)}\n", ("hermes", "auto"), "Look:", [("get_weather", ARGUMENTS), ("now", {})]),
    (f"<tool_call>{NOW}</tool_call> Done.", ("hermes", "auto"), "Done.", [("now", {})]),
    (f"<tool_call>{NOW}", ("hermes", "auto"), "", [("now", {})]),  # without its closing tag
    ('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', ("hermes", "auto"), "", [("now", {"a": 1})]),
    (f"<tool_call>\n{NOW}\n</tool", ("hermes", "auto"), "", [("now", {})]),  # the limit of tokens has cut it
    (f"<tool_call>\n{NOW}\n</b>", ("hermes", "auto"), "</b>", [("now", {})]),
    ('<tool_call>{"name": "now"}</tool_call>', ("hermes", "auto"), "", [("now", {})]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', ("hermes",), "", [("now", {})]),
    ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', ("hermes",), "", [("now", {"a": 1})]),
    ('<tool_call>{"name": "now", "arguments": {}, "id": {"x": "}"}}</tool_call>', ("hermes",), "", [("now", {})]),
    (LLAMA_WEATHER, ("llama", "auto"), "", [("get_weather", ARGUMENTS)]),
    (f"<|python_tag|>{LLAMA_WEATHER}; {NOW}", ("llama", "auto"), "", [("get_weather", ARGUMENTS), ("now", {})]),
    (f" \n{LLAMA_WEATHER};{LLAMA_WEATHER}\n", ("llama",), "", [("get_weather", ARGUMENTS)] * 2),
    ('{"type": "function", "name": "now", "parameters": {}}', ("llama", "auto"), "", [("now", {})]),
    ('{"name": "now", "parameters": {}, "type": "function"} so', ("llama", "auto"), "so", [("now", {})]),
]  # fmt: skip
CALL_CASES = [(text, ToolFormat(name), shown, calls) for text, names, shown, calls in CALLS for name in names]

# What is no call stays text, to the last character.
PLAIN = [
    "", " ", "Hello <b>world</b> <", "a <tool_cal", "\n<tool_call>", "<tool_call>\n", "<|python_tag|>", "<|pyth",
    "<tool_call>\nnot json\n</tool_call>", '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', '<tool_call>{"nam', '<tool_call>{"name": "now", "argu',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<tool_call>{}</tool_call> <tool_call>[]</tool_call>",
    '{"answer": 42}', '{"name": "Bob", "age": 3}', '{"name": "Bob", "parameters": {}}', "{", "{ not json", '{"na',
    "<|python_tag|>print(1)", '{"name": "now", "parameters": {}' [:-2], "<tool_call><tool_call>", "é <tool_call>\u2028",
]  # fmt: skip


@pytest.mark.parametrize(("text", "tool_format", "shown", "calls"), CALL_CASES)
def test_calls_are_read_however_the_text_is_cut(
    text: str, tool_format: ToolFormat, shown: str, calls: list[tuple[str, object]]
) -> None:
    whole = read([text], tool_format)
    assert whole.text == shown
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    assert read(list(text), tool_format) == whole
    for first in range(len(text)):
        for second in range(first, len(text), 7):
            assert read([text[:first], text[first:second], text[second:]], tool_format) == whole


@pytest.mark.parametrize("tool_format", ToolFormat)
@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_is_text(text: str, tool_format: ToolFormat) -> None:
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]], tool_format) == Read(text)
    assert read(list(text), tool_format) == Read(text)


def test_malformed_call_before_a_good_one_is_text() -> None:
    text = f"<tool_call>\noops\n</tool_call>\n{tagged(NOW)}"
    for cut in range(len(text) + 1):
        got = read([text[:cut], text[cut:]], ToolFormat.AUTO)
        assert got == Read("<tool_call>\noops\n</tool_call>", [("now", "{}")])


def test_call_is_announced_before_its_arguments_are_whole() -> None:
    parser, head = ToolParser(ToolFormat.HERMES, NAMES), '<tool_call>\n{"name": "get_weather", "arguments": {'
    assert parser.feed(head[:-1]) == []
    assert parser.feed("{") == [CallStart(0, "get_weather"), CallArguments(0, "{")]
    assert parser.feed('"city": "Os') == [CallArguments(0, '"city": "Os')]
    assert parser.finish() == [] and parser.num_calls == 1  # cut by its length: what there is of it


def test_only_the_first_call_without_parallel_calls() -> None:
    text = f"{tagged(WEATHER, NOW)} end"
    for cut in range(len(text) + 1):
        got = read([text[:cut], text[cut:]], ToolFormat.HERMES, parallel=False)
        assert [name for name, _ in got.calls] == ["get_weather"] and got.text == "end"


@pytest.mark.parametrize(
    ("text", "tool_format"),
    [
        (tagged(WEATHER, NOW), ToolFormat.HERMES),
        (tagged(WEATHER, NOW), ToolFormat.AUTO),
        (f"{LLAMA_WEATHER}; {NOW.replace('arguments', 'parameters')}", ToolFormat.LLAMA),
    ],
)
def test_forced_call_that_is_cut_shows_its_name_or_nothing(text: str, tool_format: ToolFormat) -> None:
    whole = read([text], tool_format, forced=True)
    assert [name for name, _ in whole.calls] == ["get_weather", "now"]
    for cut in range(len(text) + 1):
        got = read([text[:cut]], tool_format, forced=True)
        assert got == read(list(text[:cut]), tool_format, forced=True) and got.text == ""
        names = [name for name in ("get_weather", "now") if f'"{name}"' in text[:cut]]
        assert [name for name, _ in got.calls] == names
        assert all(full[1].startswith(part[1]) for full, part in zip(whole.calls, got.calls, strict=False))
        alone = read([text[:cut]], tool_format, forced=True, parallel=False)
        assert alone == Read("", got.calls[:1])


def test_text_is_shown_at_once_where_it_can_be_no_call() -> None:
    parser = ToolParser(ToolFormat.AUTO, NAMES)
    assert parser.feed("Hello") == [Text("Hello")]
    assert parser.feed(" world <") == [Text(" world")]
    assert parser.feed("3") == [Text(" <3")]


PARTS = st.lists(
    st.sampled_from([
        "<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", '"name"', ": ", '"now"', ", ", '"arguments"', "{}",
        NOW, LLAMA_WEATHER, ";", "\n", " ", "x", '"', "\\", "<", "[", "]",
    ])
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(PARTS, st.sampled_from(ToolFormat), st.data())
def test_any_text_gives_the_same_however_it_is_cut(
    parts: list[str], tool_format: ToolFormat, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read([text], tool_format)
    assert read(pieces, tool_format) == whole == read(list(text), tool_format)
    if not whole.calls:
        assert whole.text == text
