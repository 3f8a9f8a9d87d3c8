"""Mailboxes of requests with several sequences: what goes out, in which order, and how a request ends."""

from __future__ import annotations

import random

import pytest

from nereid.errors import ErrorCode
from nereid.request import FinishReason, RequestFailure, RequestOutput, RequestStats, TokenLogprobs
from nereid.server.mailbox import Letter, Mailbox
from nereid.server.reply import ReplyBuilder, ReplyOptions

BEST = TokenLogprobs(4, -0.5, 1)


class Channel:
    """Nothing is sent by a mailbox."""

    trace_context = None

    def send(self, reply: object, *, final: bool) -> None:
        raise AssertionError

    fail = cancelled = send


def make(num_sequences: int, *, stream: bool) -> Mailbox:
    options = ReplyOptions(stream, "", 3, num_sequences=num_sequences)
    return Mailbox(Channel(), ReplyBuilder(options, str, block_size=4))  # type: ignore[arg-type]


def delta(index: int, text: str, reason: FinishReason | None = None, *, final: bool = False) -> RequestOutput:
    stats = RequestStats(1.0) if final else None
    return RequestOutput(1, text, (7,), finish_reason=reason, sequence_index=index, stats=stats, final=final)


def shown(letters: list[Letter]) -> list[tuple[int, str, bool]]:
    return [(o.sequence_index, o.text, letter.final) for letter in letters for o in letter.outputs]


def test_each_sequence_of_a_stream_has_letters_of_its_own() -> None:
    mailbox = make(3, stream=True)
    for index, text in ((0, "a"), (2, "x"), (1, ""), (0, "b")):
        mailbox.put(delta(index, text))
    assert shown(mailbox.take()) == [(0, "ab", False), (2, "x", False)] and mailbox.num_merged == 1
    assert mailbox.take() == []
    mailbox.put(delta(1, "é", FinishReason.STOP))
    mailbox.put(delta(2, "", FinishReason.LENGTH))
    assert shown(mailbox.take()) == [(1, "é", False), (2, "", False)]
    mailbox.put(delta(0, "c", FinishReason.LENGTH, final=True))
    assert shown(mailbox.take()) == [(0, "c", True)]
    assert mailbox.ending(None).reasons == (FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH)


def test_the_final_letter_is_the_last_whatever_has_piled_up() -> None:
    """The request's last output may be of a sequence whose first one came before those of others."""
    mailbox = make(3, stream=True)
    for index in range(3):
        mailbox.put(delta(index, str(index)))
    mailbox.put(delta(1, "b", FinishReason.STOP))
    mailbox.put(delta(2, "c", FinishReason.STOP))
    mailbox.put(delta(0, "a", FinishReason.STOP, final=True))
    assert shown(mailbox.take()) == [(1, "1b", False), (2, "2c", False), (0, "0a", True)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_mixed_up_whenever_letters_are_taken(stream: bool, seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 5)
    texts = ["".join(draw.choice("abc") for _ in range(draw.randint(1, 9))) for _ in range(n)]
    left = [list(text) for text in texts]
    mailbox, letters = make(n, stream=stream), list[Letter]()
    while open_ones := [index for index in range(n) if left[index]]:
        index = draw.choice(open_ones)
        text = left[index].pop(0)
        ends = not left[index]
        mailbox.put(delta(index, text, FinishReason.STOP if ends else None, final=ends and len(open_ones) == 1))
        if draw.random() < 0.5:
            letters += mailbox.take()
    letters += mailbox.take()
    assert [letter.final for letter in letters] == [False] * (len(letters) - 1) + [True]
    outputs = [output for letter in letters for output in letter.outputs]
    for index in range(n):
        own = [output for output in outputs if output.sequence_index == index]
        assert "".join(output.text for output in own) == texts[index]
        assert sum(len(output.token_ids) for output in own) == len(texts[index])
        assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
    assert stream or [output.sequence_index for output in outputs] == list(range(n))


def test_an_answer_that_does_not_stream_is_one_letter_in_the_order_of_its_sequences() -> None:
    mailbox = make(2, stream=False)
    mailbox.put(delta(1, "b", FinishReason.LENGTH))
    assert mailbox.take() == []
    mailbox.put(delta(0, "a", FinishReason.STOP, final=True))
    (letter,) = mailbox.take()
    assert shown([letter]) == [(0, "a", True), (1, "b", True)] and letter.outputs[0].stats is not None


def test_the_prompts_logprobs_go_with_whatever_goes_first() -> None:
    """The sequence that brought them may have no text yet."""
    mailbox = make(2, stream=True)
    mailbox.put(RequestOutput(1, "", (7,), prompt_logprobs=(BEST,)))
    assert mailbox.take() == []
    mailbox.put(delta(1, "b"))
    mailbox.put(delta(0, "a"))
    told = {letter.outputs[0].sequence_index: letter.outputs[0].prompt_logprobs for letter in mailbox.take()}
    first, second = told.values()
    assert first == (BEST,) and second == ()


@pytest.mark.parametrize(
    ("code", "stream", "expected"),
    [
        (ErrorCode.INTERNAL, True, [(0, "stop", "a"), (1, "error", "b")]),
        (ErrorCode.INTERNAL, False, []),
        (ErrorCode.CANCELLED, True, []),
        (ErrorCode.CANCELLED, False, []),
    ],
)
def test_a_request_that_fails_shows_what_was_held_of_each_sequence(
    code: ErrorCode, stream: bool, expected: list[tuple[int, str, str]]
) -> None:
    mailbox = make(3, stream=stream)
    for output in (delta(0, "a", FinishReason.STOP), delta(1, "b"), delta(2, "")):
        mailbox.put(output)
    failure = RequestFailure(code, "why")
    mailbox.put(RequestOutput(1, failure=failure, final=True))
    *letters, last = mailbox.take()
    assert last == Letter(failure=failure, final=True)
    assert [
        (o.sequence_index, letter.reason or (o.finish_reason.value if o.finish_reason else ""), o.text)
        for letter in letters
        for o in letter.outputs
    ] == expected
    assert not any(letter.final for letter in letters)
    ending = mailbox.ending(failure)
    assert (ending.last.failure, ending.reasons, ending.num_sequences) == (failure, (FinishReason.STOP,), 3)
