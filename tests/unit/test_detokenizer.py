"""Incremental text: characters, control tokens, stop strings; against the full decode, on the real tokenizer."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import tokenizers
from tokenizers import decoders, models

from nereid.output_processor import OutputProcessor
from nereid.request import FinishReason, Request, SamplingParams
from nereid.tokenization.detokenizer import Detokenizer
from nereid.tokenization.stop_checker import StopChecker
from nereid.tokenization.tokenizer import Tokenizer

TEXT = "naïve café — 日本語のテキスト 🙂👩‍👩‍👧‍👦 “quoted”\n\n\tend \u200b\ufeff e\u0301"


def pieces(tokenizer: Tokenizer, prompt: tuple[int, ...], tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.append(token) for token in tokens), detokenizer.flush()]


def test_whole_characters_only_and_nothing_lost(smollm2_tokenizer: Tokenizer) -> None:
    tokens = list(smollm2_tokenizer.encode(TEXT))
    parts = pieces(smollm2_tokenizer, (), tokens)
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)


def test_the_join_equals_the_full_decode_for_any_ids(smollm2_tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    multi_byte = [i for i in range(49152) if "\ufffd" in smollm2_tokenizer.decode([i])]
    for _ in range(10_000):
        pool = rng.choice([range(49152), range(17), multi_byte, range(49140, 60_000)])
        tokens = [rng.choice(pool) for _ in range(rng.randrange(1, 80))]
        assert "".join(pieces(smollm2_tokenizer, (), tokens)) == smollm2_tokenizer.decode(tokens)


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_prompt_that_ends_inside_a_character_does_not_leak(smollm2_tokenizer: Tokenizer, cut: int) -> None:
    tokens = smollm2_tokenizer.encode("before 𓀀 after")
    assert len(tokens) == 7  # the character is four tokens of one byte each
    prompt, rest = tokens[: cut + 1], list(tokens[cut + 1 :])
    shown = smollm2_tokenizer.decode(prompt).removesuffix("\ufffd")
    parts = pieces(smollm2_tokenizer, prompt, rest)
    assert shown + "".join(parts) == "before 𓀀 after"
    assert not any("\ufffd" in part for part in parts)


def test_a_prompt_that_really_ends_in_a_replacement_character(smollm2_tokenizer: Tokenizer) -> None:
    prompt = smollm2_tokenizer.encode("odd \ufffd")
    assert "".join(pieces(smollm2_tokenizer, prompt, list(smollm2_tokenizer.encode(" next")))) == " next"


def test_an_unfinished_character_shows_at_the_end(smollm2_tokenizer: Tokenizer) -> None:
    tokens = list(smollm2_tokenizer.encode("ok 𓀀"))[:-1]
    assert "".join(pieces(smollm2_tokenizer, (), tokens)) == "ok \ufffd"


def test_long_outputs_cost_the_same_for_each_token(smollm2_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2_tokenizer, ())
    for token in [2, 199, 5000] * 500:  # control tokens and broken bytes among words
        detokenizer.append(token)
    assert len(detokenizer._window) <= 33


def cuts(text: str, max_cuts: int) -> list[list[str]]:
    """Every way to cut `text` at up to `max_cuts` places."""
    found = []
    for count in range(max_cuts + 1):
        for places in itertools.combinations(range(1, len(text)), count):
            bounds = (0, *places, len(text))
            found.append([text[a:b] for a, b in itertools.pairwise(bounds)])
    return found


def check_stop(parts: list[str], *stop: str, include: bool = False) -> tuple[str, bool, list[str]]:
    checker, shown = StopChecker(stop, include_stop=include), []
    for part in parts:
        text, found = checker.append(part)
        shown.append(text)
        if found is not None:
            assert found in stop
            return "".join(shown), True, shown
    return "".join(shown) + checker.flush(), False, shown


def test_no_part_of_a_stop_string_is_shown_however_it_is_cut() -> None:
    for parts in cuts("...ABC DEFGHIJ tail", 3):
        text, stopped, shown = check_stop(parts, "DEFGHIJ")
        assert (text, stopped) == ("...ABC ", True)
        assert "D" not in "".join(shown)


def test_a_near_miss_is_shown_whole() -> None:
    for parts in cuts("ABC DEFGHIX DEFG", 3):
        assert check_stop(parts, "DEFGHIJ")[:2] == ("ABC DEFGHIX DEFG", False)


def test_a_stop_string_is_shown_where_it_was_asked_for() -> None:
    for parts in cuts("...ABC DEFGHIJ tail", 3):
        assert check_stop(parts, "DEFGHIJ", include=True)[:2] == ("...ABC DEFGHIJ", True)


def test_the_earliest_of_several_stops_wins() -> None:
    for parts in cuts("one two three", 3):
        text, stopped, _ = check_stop(parts, "three", "two", "ee")
        assert stopped and text == "one "


def test_overlapping_beginnings_are_held_back_at_full_length() -> None:
    for parts in cuts("aabaabaac", 4):
        assert check_stop(parts, "aabaac")[:2] == ("aab", True)


def outputs(tokenizer: Tokenizer, text: str, **sampling: object) -> tuple[str, FinishReason | None, int]:
    """What a request shows whose tokens are those of `text`."""
    params = SamplingParams(**{"max_tokens": 1000, **sampling})  # type: ignore[arg-type]
    processor = OutputProcessor(tokenizer)
    processor.add(Request(1, (1,), params, 0.0))
    shown, count = "", 0
    for token in tokenizer.encode(text):
        output = processor.advance(1, token, None)
        shown, count = shown + output.text, count + len(output.token_ids)
        if output.finished:
            return shown, output.finish_reason, count
    return shown + processor.end(1, FinishReason.TIMEOUT).text, FinishReason.TIMEOUT, count


def test_a_stop_string_ends_a_request(smollm2_tokenizer: Tokenizer) -> None:
    text, reason, _ = outputs(smollm2_tokenizer, "The answer is 42. And more.", stop=("42.",))
    assert (text, reason) == ("The answer is ", FinishReason.STOP)


def test_no_stop_string_counts_before_min_tokens(smollm2_tokenizer: Tokenizer) -> None:
    text, reason, count = outputs(smollm2_tokenizer, "a b a b a b a b", stop=("b",), min_tokens=4)
    assert reason is FinishReason.STOP and count > 4 and text.startswith("a b a b")


def test_what_is_held_back_is_shown_at_the_end(smollm2_tokenizer: Tokenizer) -> None:
    assert outputs(smollm2_tokenizer, "The answer is 4", stop=("42",))[0] == "The answer is 4"


def test_threads_may_share_a_tokenizer(smollm2_tokenizer: Tokenizer) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(200):
                text = f"thread {number} text {i} {TEXT}"
                assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As SentencePiece models are: visible spaces, 256 byte tokens, a leading space that is not shown."""
    words = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁Hello", "▁world", "é", "▁", "a", "b", "中"]
    library = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("byte-fallback")
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def byte_ids(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


HELLO, WORLD = 257, 258


def test_byte_fallback_characters_come_whole_and_at_once(byte_fallback: Tokenizer) -> None:
    tokens = [HELLO, *byte_ids("文🙂"), WORLD, *byte_ids("é"), 261]
    parts = pieces(byte_fallback, (), tokens)
    assert "".join(parts) == byte_fallback.decode(tokens) == "Hello文🙂 worldéa"
    assert parts[:8] == ["Hello", "", "", "文", "", "", "", "🙂"]


def test_long_runs_of_byte_fallback_tokens_are_given_out_once(byte_fallback: Tokenizer) -> None:
    text = "漢字かな" * 50
    assert "".join(pieces(byte_fallback, (), [*byte_ids(text), WORLD])) == text + " world"
    assert "".join(pieces(byte_fallback, (HELLO, *byte_ids("字")[:2]), byte_ids("字")[2:] + [WORLD])) == "字 world"


def test_broken_byte_fallback_shows_what_is_whole_and_never_takes_it_back(byte_fallback: Tokenizer) -> None:
    tokens = [*byte_ids("中文"), 1 + 0xE6, WORLD, 1 + 0xFF, 261]
    assert "".join(pieces(byte_fallback, (), tokens)) == "中文\ufffd world\ufffda"
    assert "".join(pieces(byte_fallback, (), tokens[:7])) == "中文\ufffd"


def test_any_ids_of_a_byte_fallback_tokenizer_give_text_that_only_grows(byte_fallback: Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(2000):
        tokens: list[int] = []
        for _ in range(rng.randrange(1, 30)):
            tokens += rng.choice([[HELLO], [WORLD], byte_ids(rng.choice("é中🙂~")), [261, 262], [260]])
        assert "".join(pieces(byte_fallback, (), tokens)) == byte_fallback.decode(tokens)
