"""ToolParser: a model's text -> text for the reader, and calls of tools; part by part, however it is cut. Pure.

What always holds: nothing is lost but white space, tags and separators beside calls: what is not a call of a declared
tool is text. The same text gives the same events, joined, whatever parts it comes in. Only what may still become a
tag, a call, or white space beside one is held back.
"""

from __future__ import annotations

from collections.abc import Set

from nereid.gateway.call_reader import CallReader, Event, Text
from nereid.gateway.tool_format import CALL_CLOSES, CALL_OPENS, PYTHON_TAG, ToolFormat


class ToolParser:
    """Fed with the parts of one answer, then finished."""

    def __init__(
        self, tool_format: ToolFormat, names: Set[str], *, parallel: bool = True, forced: bool = False
    ) -> None:
        """names: of the declared tools.  parallel: false: calls after the first are dropped.  forced: a guide lets
        the model write nothing but calls: what the end cuts, of one or of its tags, is then no text."""
        self._names = names
        self._forced = forced
        self._parallel = parallel
        self._tags = tool_format is not ToolFormat.LLAMA
        self._bare = tool_format is not ToolFormat.HERMES
        self._pending = ""  # not decided yet
        self._opening = ""  # what opened the call that is being read
        self._call: CallReader | None = None
        self._no_text_yet = True  # where a bare call may begin
        self._after_call = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """What the next part of the answer tells."""
        self._pending += text
        return self._steps()

    def finish(self) -> list[Event]:
        """No more will come: what was held back."""
        events: list[Event] = []
        while self._call is not None:
            started = self._call.finish(forced=self._forced)
            events += [*self._shown(started), *self._end_call(self._call), *self._steps()]
        rest, self._pending = self._pending, ""
        cut_tag = self._tags and self._after_call and CALL_CLOSES.startswith(rest)
        events = events if cut_tag else [*events, *self._text(rest)]
        return [event for event in events if not (self._forced and isinstance(event, Text))]

    def _steps(self) -> list[Event]:
        events: list[Event] = []
        while (found := self._step()) is not None:
            events += found
        return events

    def _step(self) -> list[Event] | None:
        """What can be decided next; None where that needs more text."""
        if self._call is not None:
            return self._read_call(self._call)
        if self._after_call:
            self._skip_separators()
            if self._tags and CALL_CLOSES.startswith(self._pending):
                return None
        if not self._pending:
            return None
        if self._bare and self._no_text_yet:
            return self._read_start()
        return self._read_text()

    def _read_call(self, call: CallReader) -> list[Event] | None:
        text, self._pending = self._pending, ""
        events = call.feed(text) if text else []
        shown = self._shown(events)
        return [*shown, *self._end_call(call)] if call.ended else shown or None

    def _shown(self, events: list[Event]) -> list[Event]:
        """Those of the call that is being read, which is not shown where it is one too many."""
        return events if self._parallel or self.num_calls == 0 else []

    def _end_call(self, call: CallReader) -> list[Event]:
        self._call, self._pending = None, call.rest
        if call.is_call:
            self.num_calls += 1
            self._after_call = True
            return []
        self._no_text_yet = False
        return self._text(self._opening)

    def _skip_separators(self) -> None:
        before = None
        while self._pending != before:
            before, self._pending = self._pending, self._pending.lstrip()
            if self._tags:
                self._pending = self._pending.removeprefix(CALL_CLOSES)
            if self._bare:
                self._pending = self._pending.removeprefix(";")

    def _read_start(self) -> list[Event] | None:
        stripped = self._pending.lstrip()
        white = self._pending[: len(self._pending) - len(stripped)]
        if PYTHON_TAG.startswith(stripped) or (self._tags and CALL_OPENS.startswith(stripped)):
            return None if stripped != PYTHON_TAG else self._open_call(white + PYTHON_TAG, "")
        if stripped.startswith(PYTHON_TAG):
            return self._open_call(white + PYTHON_TAG, stripped.removeprefix(PYTHON_TAG))
        return self._open_call(white, stripped) if stripped.startswith("{") else self._read_text()

    def _read_text(self) -> list[Event] | None:
        if not self._tags:
            shown, self._pending = self._pending, ""
            return self._text(shown)
        before, tag, after = self._pending.partition(CALL_OPENS)
        if tag:
            shown = before.rstrip()
            return [*self._text(shown), *self._open_call(before[len(shown) :] + tag, after)]
        decided = len(before) - _held_back(before)
        self._pending = before[decided:]
        return self._text(before[:decided]) if decided else None

    def _open_call(self, opening: str, after: str) -> list[Event]:
        self._opening, self._pending = opening, after
        self._call = CallReader(self._names, self.num_calls)
        return []

    def _text(self, text: str) -> list[Event]:
        text = text.lstrip() if self._after_call else text
        if not text:
            return []
        self._after_call = self._no_text_yet = False
        return [Text(text)]


def _held_back(text: str) -> int:
    """How many characters at the end of `text` may be white space before a tag, and the beginning of the tag."""
    for length in range(min(len(CALL_OPENS) - 1, len(text)), 0, -1):
        if text.endswith(CALL_OPENS[:length]):
            return len(text) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())
