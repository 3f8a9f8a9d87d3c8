"""Mailboxes and the sender thread, with a channel that records: merging, one final response, clients that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from nereid.errors import ErrorCode
from nereid.request import FinishReason, RequestFailure, RequestOutput, RequestStats, TokenLogprobs
from nereid.server.mailbox import Ending
from nereid.server.outcomes import Outcomes
from nereid.server.reply import Reply, ReplyBuilder, ReplyOptions, Rows
from nereid.server.response_stream import ResponseStream


@dataclass
class Channel:
    """Records what is sent. gate: where set, `send` waits for it, as for a slow client."""

    replies: list[tuple[Reply, bool]] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    gate: threading.Event | None = None
    gone: bool = False
    broken: bool = False
    asked_after_final: bool = False
    trace_context: str | None = None

    @property
    def ended(self) -> bool:
        return bool(self.failures) or any(final for _, final in self.replies)

    def has_replies(self, count: int) -> bool:
        return len(self.replies) >= count

    def send(self, reply: Reply, *, final: bool) -> None:
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.broken:
            raise RuntimeError("the client's connection is gone")
        self.replies.append((reply, final))

    def fail(self, failure: RequestFailure) -> None:
        self.failures.append(failure)

    def cancelled(self) -> bool:
        self.asked_after_final = self.asked_after_final or self.ended
        return self.gone


WANTED = frozenset({"finish_reason", "num_output_tokens", "perf_metrics"})


def options(*, stream: bool = True, prefix: str = "") -> ReplyBuilder:
    return ReplyBuilder(ReplyOptions(stream, prefix, 3, WANTED), lambda token_id: f"<{token_id}>", block_size=4)


def values_of(reply: Reply, name: str) -> list[object]:
    values = reply[name]
    assert not isinstance(values, Rows)
    return list(values)


def text_of(reply: Reply) -> str:
    (text,) = values_of(reply, "text_output")
    return str(text)


def count_of(reply: Reply) -> int:
    (count,) = values_of(reply, "num_output_tokens")
    assert isinstance(count, int)
    return count


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def make(cancelled: list[int] | None = None, outcomes: Outcomes | None = None) -> ResponseStream:
    stream = ResponseStream((cancelled if cancelled is not None else []).append, outcomes or Outcomes())
    stream.start()
    return stream


def test_each_delta_is_a_response_and_the_last_one_is_final() -> None:
    stream, channel = make(), Channel()
    stream.register(1, channel, options())
    for count, text in enumerate(("a", "b"), start=1):
        stream.emit((RequestOutput(1, text, (7,)),))
        wait_for(partial(channel.has_replies, count))
    stream.emit((RequestOutput(1, "c", (7,), finish_reason=FinishReason.STOP, final=True),))
    wait_for(lambda: channel.ended)
    stream.close(5)
    assert [(text_of(r), r["finish_reason"], count_of(r), final) for r, final in channel.replies] == [
        ("a", ["None"], 1, False),
        ("b", ["None"], 1, False),
        ("c", ["stop"], 1, True),
    ]


def test_what_piles_up_is_merged_and_nothing_is_lost() -> None:
    outcomes = Outcomes()
    stream, slow, fast = make(outcomes=outcomes), Channel(gate=threading.Event()), Channel()
    stream.register(1, slow, options())
    stream.register(2, fast, options())
    for index in range(200):
        stream.emit((RequestOutput(1, f"{index},", (7,)), RequestOutput(2, f"{index};", (7,))))
    stats = RequestStats(1.0)
    stream.emit(
        (
            RequestOutput(1, "", finish_reason=FinishReason.LENGTH, stats=stats, final=True),
            RequestOutput(2, "", finish_reason=FinishReason.LENGTH, stats=stats, final=True),
        )
    )
    assert slow.gate is not None
    slow.gate.set()
    wait_for(lambda: slow.ended and fast.ended)
    stream.close(5)
    for channel, mark in ((slow, ","), (fast, ";")):
        assert "".join(text_of(r) for r, _ in channel.replies) == "".join(f"{i}{mark}" for i in range(200))
        assert sum(count_of(r) for r, _ in channel.replies) == 200
        assert [final for _, final in channel.replies].count(True) == 1 and channel.replies[-1][1]
    assert len(slow.replies) <= 3
    # Each delta went out in a response of its own or with a later one; the end, which has no text, is none.
    for channel in (slow, fast):
        (num_merged,) = values_of(channel.replies[-1][0], "num_merged_responses")
        assert isinstance(num_merged, int)
        num_with_text = sum(bool(text_of(reply)) for reply, _ in channel.replies)
        assert num_merged == 200 - num_with_text + bool(text_of(channel.replies[-1][0]))
    report = outcomes.take()
    assert report.finished == {FinishReason.LENGTH: 2}
    # Each delta had a response of its own, or was merged; only the last output has no text.
    sent = sum(bool(text_of(r)) for r, _ in slow.replies + fast.replies)
    assert 400 - sent <= report.num_merged <= 402 - sent


def test_a_whole_answer_is_not_counted_as_merged_and_a_refusal_is_counted() -> None:
    outcomes, traced = Outcomes(), list[tuple[str, Ending]]()
    stream = ResponseStream(lambda _: None, outcomes, lambda *ended: traced.append(ended))
    stream.start()
    whole, refused = Channel(), Channel(trace_context="{}")
    stream.register(1, whole, options(stream=False))
    stream.emit(tuple(RequestOutput(1, str(index), (7,)) for index in range(5)))
    stream.emit((RequestOutput(1, "", finish_reason=FinishReason.STOP, final=True),))
    stream.refuse(refused, RequestFailure(ErrorCode.INVALID_ARGUMENT, "no"))
    wait_for(lambda: whole.ended and refused.ended)
    stream.close(5)
    report = outcomes.take()
    assert (report.finished, report.failed) == ({FinishReason.STOP: 1}, {ErrorCode.INVALID_ARGUMENT: 1})
    assert report.num_merged == 0
    ((context, ending),) = traced  # the other one is not traced by the server
    assert context == "{}" and ending.last.failure == RequestFailure(ErrorCode.INVALID_ARGUMENT, "no")


def test_a_request_that_does_not_stream_gets_one_response_with_its_prompt() -> None:
    stream, channel = make(), Channel()
    stream.register(1, channel, options(stream=False, prefix="prompt "))
    for index in range(5):
        stream.emit((RequestOutput(1, str(index), (7,)),))
    stream.emit((RequestOutput(1, "", finish_reason=FinishReason.TIMEOUT, final=True),))
    wait_for(lambda: channel.ended)
    stream.close(5)
    ((reply, final),) = channel.replies
    assert reply == {"text_output": ["prompt 01234"], "finish_reason": ["timeout"], "num_output_tokens": [5]} and final


def test_a_token_without_text_waits_for_text() -> None:
    stream, channel = make(), Channel()
    stream.register(1, channel, options())
    stream.emit((RequestOutput(1, "", (7,)),))
    stream.emit((RequestOutput(1, "é", (7,), finish_reason=FinishReason.STOP, final=True),))
    wait_for(lambda: channel.ended)
    stream.close(5)
    assert [(text_of(r), count_of(r)) for r, _ in channel.replies] == [("é", 2)]


def test_a_client_that_is_gone_is_cancelled_until_its_request_ends() -> None:
    cancelled: list[int] = []
    stream, channel = make(cancelled), Channel()
    stream.register(7, channel, options())
    channel.gone = True
    wait_for(lambda: cancelled[:1] == [7])
    stream.emit((RequestOutput(7, failure=RequestFailure(ErrorCode.CANCELLED, "gone"), final=True),))
    wait_for(lambda: channel.ended)
    time.sleep(0.15)  # some polls more
    stream.close(5)
    assert not channel.asked_after_final and len(channel.failures) == 1


def test_a_send_that_fails_cancels_that_request_alone() -> None:
    cancelled: list[int] = []
    stream, broken, good = make(cancelled), Channel(broken=True), Channel()
    stream.register(1, broken, options())
    stream.register(2, good, options())
    stream.emit((RequestOutput(1, "a", (7,)), RequestOutput(2, "a", (7,))))
    stream.emit((RequestOutput(2, "b", (7,), finish_reason=FinishReason.STOP, final=True),))
    wait_for(lambda: good.ended)
    stream.close(5)
    assert cancelled == [1]


def test_closing_sends_what_is_there() -> None:
    stream, channel = make(), Channel()
    stream.register(1, channel, options())
    stream.emit((RequestOutput(1, "x", (7,), finish_reason=FinishReason.STOP, final=True),))
    stream.close(5)
    assert channel.ended


@pytest.mark.parametrize(
    ("code", "stream", "held", "shown"),
    [
        (ErrorCode.INTERNAL, True, "ab", ["ab"]),
        (ErrorCode.INTERNAL, True, "", []),
        (ErrorCode.INTERNAL, False, "ab", []),
        (ErrorCode.CANCELLED, True, "ab", []),
    ],
)
def test_a_stream_that_breaks_off_first_gets_what_was_held(
    code: ErrorCode, stream: bool, held: str, shown: list[str]
) -> None:
    responses, channel = make(), Channel()
    responses.register(1, channel, options(stream=stream))
    responses.emit((RequestOutput(1, held, (7,)), RequestOutput(1, failure=RequestFailure(code, "why"), final=True)))
    wait_for(lambda: channel.ended)
    responses.close(5)
    assert [(text_of(r), r["finish_reason"], final) for r, final in channel.replies] == [
        (text, ["error"], False) for text in shown
    ]
    assert channel.failures == [RequestFailure(code, "why")]


def test_sequences_of_a_stream_are_responses_of_their_own_and_each_end_is_counted() -> None:
    outcomes = Outcomes()
    stream, channel = make(outcomes=outcomes), Channel()
    asked = ReplyOptions(True, "", 3, WANTED, num_sequences=2)
    stream.register(1, channel, ReplyBuilder(asked, str, block_size=4))
    stream.emit((RequestOutput(1, "a", (7,)), RequestOutput(1, "x", (7,), sequence_index=1)))
    wait_for(partial(channel.has_replies, 2))
    stream.emit((RequestOutput(1, "b", (7,), finish_reason=FinishReason.STOP),))
    wait_for(partial(channel.has_replies, 3))
    assert not channel.ended, "one sequence is not the request"
    stream.emit((RequestOutput(1, "y", (7,), finish_reason=FinishReason.LENGTH, sequence_index=1, final=True),))
    wait_for(lambda: channel.ended)
    stream.close(5)
    told = [(values_of(r, "sequence_index"), text_of(r), r["finish_reason"], final) for r, final in channel.replies]
    assert told == [
        ([0], "a", ["None"], False),
        ([1], "x", ["None"], False),
        ([0], "b", ["stop"], False),
        ([1], "y", ["length"], True),
    ]
    assert outcomes.take().finished == {FinishReason.STOP: 1, FinishReason.LENGTH: 1}


def test_nothing_is_sent_after_a_response_of_a_sequence_that_cannot_be_made() -> None:
    """Three sequences end at once; the second one's response breaks."""

    def spell(token_id: int) -> str:
        return {7: "seven"}[token_id]

    cancelled, outcomes = list[int](), Outcomes()
    stream, channel = make(cancelled, outcomes), Channel(gate=threading.Event())
    asked = ReplyOptions(True, "", 3, frozenset({"logprobs"}), logprobs=True, num_sequences=3)
    stream.register(1, channel, ReplyBuilder(asked, spell, block_size=4))
    stream.emit(
        tuple(
            RequestOutput(
                1, "a", (token_id,), (TokenLogprobs(token_id, -1.0, 1),), (), FinishReason.STOP,
                sequence_index=index, final=index == 2,
            )
            for index, token_id in enumerate((7, 8, 7))
        )
    )  # fmt: skip
    assert channel.gate is not None
    channel.gate.set()
    wait_for(lambda: channel.ended)
    stream.close(5)
    assert len(channel.replies) == 1 and [failure.code for failure in channel.failures] == [ErrorCode.INTERNAL]
    report = outcomes.take()
    assert (report.finished, report.failed) == ({FinishReason.STOP: 1}, {ErrorCode.INTERNAL: 1}) and cancelled == [1]


@pytest.mark.parametrize("finished", [False, True])
def test_a_response_that_cannot_be_made_ends_its_request_alone_with_an_error(finished: bool) -> None:
    def raise_always(token_id: int) -> str:
        raise KeyError(token_id)

    cancelled: list[int] = []
    responses, channel, good = make(cancelled), Channel(), Channel()
    asked = ReplyOptions(True, "", 3, frozenset({"logprobs"}), logprobs=True)
    responses.register(1, channel, ReplyBuilder(asked, raise_always, block_size=4))
    responses.register(2, good, options())
    reason = FinishReason.STOP if finished else None
    responses.emit((RequestOutput(1, "a", (7,), (TokenLogprobs(7, -1.0, 1),), finish_reason=reason, final=finished),))
    responses.emit((RequestOutput(2, "a", (7,), finish_reason=FinishReason.STOP, final=True),))
    wait_for(lambda: channel.ended and good.ended)
    responses.close(5)
    assert [failure.code for failure in channel.failures] == [ErrorCode.INTERNAL] and cancelled == [1]
    assert not channel.replies and len(good.replies) == 1
