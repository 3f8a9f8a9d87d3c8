"""Guides force their outputs, with SmolLM2's own tokenizer; matchers roll back and fork; tokenizers may not fit."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nereid.errors import GuideError, InvalidRequestError, QueueTimeoutError
from nereid.guided.compiler import GuideCompiler
from nereid.guided.handover import Handover
from nereid.guided.limits import MAX_SOURCE_CHARS
from nereid.guided.masks import fill_masks
from nereid.guided.tracker import GuideTracker
from nereid.request import Guide, GuideKind
from nereid.tokenization.tokenizer import Tokenizer
from tests.guides import SCHEMAS, allowed_tokens, assert_valid, schema_guide, walk

VOCAB = 49152
EOS = 2

ARITHMETIC_LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
ARITHMETIC_EBNF = """
root    ::= product ([+\\-] product)*   # a sum
product ::= atom (("*" | "/") atom)*
atom    ::= [0-9]{1,3} | "(" root ")"
"""
ARITHMETIC = re.compile(r"[0-9()+*/-]+")


@pytest.fixture(scope="module")
def compiler(smollm2_tokenizer: Tokenizer) -> GuideCompiler:
    return GuideCompiler(smollm2_tokenizer, VOCAB, (EOS,))


def texts(compiler: GuideCompiler, tokenizer: Tokenizer, guide: Guide, count: int = 8, marks: str = "") -> list[str]:
    """What random tokens write under a guide, of those walks that come to an end; tokens with `marks` come first."""

    def wanted(token: int) -> bool:
        return not marks or not set(marks).isdisjoint(tokenizer.name_of(token) or "")

    rng = random.Random(5)
    walks = [walk(compiler.compile(guide), VOCAB, EOS, rng, wants=wanted) for _ in range(count)]
    ended = [tokenizer.decode(tokens) for tokens, complete in walks if complete]
    assert len(ended) > count / 2
    return ended


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_forces_instances(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer, name: str) -> None:
    for text in texts(compiler, smollm2_tokenizer, schema_guide(name), 6):
        assert_valid(text, SCHEMAS[name])


def test_json_object_forces_objects(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer) -> None:
    for text in texts(compiler, smollm2_tokenizer, Guide(GuideKind.JSON_OBJECT), marks='"}'):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "expression",
    [
        r"[a-c]{2,5}",
        r"^(foo|bar)+baz?$",
        r"\d{3}-\d{4}",
        r"(é|日本|🙂){1,3}!",
        r"a\$",
        r"^\^x\\$",
        r"[^\W\d_]{1,6}",
        r"x*",
    ],
)
def test_a_regex_forces_full_matches(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer, expression: str) -> None:
    for text in texts(compiler, smollm2_tokenizer, Guide(GuideKind.REGEX, expression)):
        assert re.fullmatch(expression, text), text


def test_choices_force_one_of_them(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer) -> None:
    choices = ["yes", "yes, but", "no", "(.*)?", "日本", "a\nb", "\\", "#x", "🙂 ok", "[a-z]{3}", "x&y~z", "q\x00"]
    found = texts(compiler, smollm2_tokenizer, Guide(GuideKind.CHOICE, json.dumps(choices)), 80)
    assert set(found) <= set(choices) and len(set(found)) >= 10


def test_every_character_of_a_choice_stands_for_itself(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer) -> None:
    unspelled = set("\x04\x06\x13\x14\x16\x1d")  # this tokenizer drops them from a text
    for character in [*sorted(set(map(chr, range(128))) - unspelled), "\x85", "\u2028", "é", "🙂"]:
        compiled = compiler.compile(Guide(GuideKind.CHOICE, json.dumps(choices := [f"a{character}b", character])))
        for text in choices:
            matcher = compiled.matcher()
            assert matcher.accept(smollm2_tokenizer.encode(text)) and matcher.can_end, text
        for text in ("ab", f"a{character * 2}b", f"\\{character}", "a_b" if character != "_" else "a-b"):
            matcher = compiled.matcher()
            assert not (matcher.accept(smollm2_tokenizer.encode(text)) and matcher.can_end), text


@pytest.mark.parametrize("grammar", [ARITHMETIC_LARK, ARITHMETIC_EBNF])
def test_a_grammar_forces_its_language(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer, grammar: str) -> None:
    for text in texts(compiler, smollm2_tokenizer, Guide(GuideKind.GRAMMAR, grammar), 12):
        assert ARITHMETIC.fullmatch(text)
        compile(
            re.sub(r"\b0+(?=\d)", "", text), "x", "eval"
        )  # Python knows the same expressions, without leading zeros


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        ('root ::= [a-z]* "z"', ["z", "az", "zz"], ["a", "zaz1"]),
        ('root ::= "a" root "b" | ""', ["aabb", "ab"], ["aab", "b"]),
        ('root ::= x-y\nx-y ::= x_y\nx_y ::= "\\u00e9" [\\x41-C\\-] .', ["éA\n", "é-x", "éB日"], ["eAx", "éDx"]),
        ('root ::= [^"\\]x] "]"{2}', ["a]]", "日]]"], ["]]]", '"]]', "x]]"]),
        ('# says\nroot ::= ("a" |\n "b")+ # more\n  "c"?', ["abbac", "b"], ["c", "abcc"]),
        ('root ::= "\\"q\\\\" [0-9]{2,}', ['"q\\12', '"q\\123'], ['"q\\1']),
        ('root ::= [a^-] "]"', ["^]", "-]"], ["b]"]),
    ],
)
def test_ebnf_means_what_it_says(
    compiler: GuideCompiler, smollm2_tokenizer: Tokenizer, grammar: str, inside: list[str], outside: list[str]
) -> None:
    def accepts(text: str) -> bool:
        matcher = compiler.compile(Guide(GuideKind.GRAMMAR, grammar)).matcher()
        return matcher.accept(smollm2_tokenizer.encode(text)) and matcher.can_end

    assert [text for text in inside if not accepts(text)] == []
    assert [text for text in outside if accepts(text)] == []


def test_white_space_in_json_is_bounded(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer) -> None:
    value = {"v": {"x": [1, 2, "é"]}}
    for text, allowed in [
        (json.dumps(value, ensure_ascii=False), True),
        (json.dumps(value, ensure_ascii=False, separators=(",", ":")), True),
        (json.dumps(value, ensure_ascii=False, indent=4), True),
        ('{"v":   {"x": [1, 2, "é"]}}', False),
        ('{"v":\n\n{"x": [1, 2, "é"]}}', False),
    ]:
        assert compiler.compile(schema_guide("const")).matcher().accept(smollm2_tokenizer.encode(text)) is allowed, text


def test_rollback_and_fork_equal_a_fresh_replay(compiler: GuideCompiler) -> None:
    rng = random.Random(11)
    for name in ("array_of_objects", "unicode", "numbers", "recursive"):
        compiled = compiler.compile(schema_guide(name))
        tokens, _ = walk(compiled, VOCAB, EOS, rng)
        matcher = compiled.matcher()
        assert matcher.accept(tokens)
        for _ in range(6):
            keep = rng.randrange(len(tokens))
            fork = matcher.fork()
            fork.rollback(len(tokens) - keep)
            fresh = compiled.matcher()
            assert fresh.accept(tokens[:keep])
            assert allowed_tokens(fork, VOCAB) == allowed_tokens(fresh, VOCAB)
            assert (fork.can_end, fork.is_complete) == (fresh.can_end, fresh.is_complete)
            assert fork.accept(tokens[keep:]) and fork.is_complete == matcher.is_complete
        with pytest.raises(ValueError, match="num_tokens"):
            matcher.rollback(len(tokens) + 1)


def test_what_is_not_allowed_changes_nothing(compiler: GuideCompiler, smollm2_tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Guide(GuideKind.REGEX, "abc[0-9]+")).matcher()
    before = allowed_tokens(matcher, VOCAB)
    assert not matcher.accept([*smollm2_tokenizer.encode("abc1"), smollm2_tokenizer.encode("x")[0]])
    assert not matcher.accept([EOS]) and not matcher.accept([1])
    assert allowed_tokens(matcher, VOCAB) == before
    assert matcher.accept(smollm2_tokenizer.encode("abc1")) and matcher.can_end and not matcher.is_complete
    assert EOS in allowed_tokens(matcher, VOCAB)
    assert matcher.accept([EOS]) and matcher.is_complete
    matcher.rollback(1)
    assert matcher.accept(smollm2_tokenizer.encode("2"))


@pytest.mark.parametrize("vocab_size", [49000, 49152, 49280, 50001])
def test_the_model_may_know_more_or_fewer_tokens_than_the_tokenizer(
    smollm2_tokenizer: Tokenizer, vocab_size: int
) -> None:
    compiled = GuideCompiler(smollm2_tokenizer, vocab_size, (EOS, 0)).compile(Guide(GuideKind.REGEX, "(?s).{0,9}"))
    words, errors = fill_masks([compiled.matcher(), compiled.matcher()], vocab_size)
    assert words.shape == (2, (vocab_size + 31) // 32) and not errors and np.array_equal(words[0], words[1])
    allowed = [token for token in allowed_tokens(compiled.matcher(), vocab_size) if token < vocab_size]
    assert {0, EOS} < set(allowed) and max(allowed) < min(vocab_size, 49152) and len(allowed) > 40_000


def test_a_tokenizer_that_spells_no_bytes_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    directory = tmp_path_factory.mktemp("words")
    library.save(str(directory / "tokenizer.json"))
    with pytest.raises(InvalidRequestError, match=r"guided_decoding: .*this model's tokenizer cannot be guided"):
        GuideCompiler(Tokenizer(directory), 2, (1,)).compile(Guide(GuideKind.JSON_OBJECT))


def test_a_dead_end_is_the_one_requests_error(smollm2_tokenizer: Tokenizer) -> None:
    """Where no token of the model spells what has to follow: here the model knows the first 300 tokens alone."""
    compiler = GuideCompiler(smollm2_tokenizer, 300, (EOS,))
    tracker = GuideTracker(compiler, 300)
    for request_id, expression in [(1, "a日"), (2, "a[a-z]{5}")]:
        compiler.compile(guide := Guide(GuideKind.REGEX, expression))
        tracker.add(request_id, guide)
    tracker.add(3, None)
    (first,) = smollm2_tokenizer.encode("a")
    assert not tracker.advance(1, first) and not tracker.advance(2, first) and not tracker.advance(3, 7)
    guided, words = tracker.masks([1, 2, 3])
    assert guided == (1, 2) and len(words) == 2 * 4 * 10
    with pytest.raises(GuideError, match="the guide cannot go on: no token of the model can follow"):
        tracker.advance(1, first)
    assert not tracker.advance(2, first)
    tracker.drop(1)
    assert tracker.masks([1, 3]) == ((), b"")


def test_a_guide_is_kept_until_its_requests_come(smollm2_tokenizer: Tokenizer) -> None:
    """Whatever is compiled meanwhile: nine guides of full length displace it from the cache."""
    compiler = GuideCompiler(smollm2_tokenizer, VOCAB, (EOS,))
    tracker = GuideTracker(compiler, VOCAB)
    guide, never = Guide(GuideKind.REGEX, "[a-c]{3}"), Guide(GuideKind.REGEX, "[d-f]{3}")
    compiled = [compiler.compile(guide) for _ in range(2)]
    for index in range(9):
        schema = json.dumps({"type": "integer", "minimum": index})
        compiler.compile(Guide(GuideKind.JSON_SCHEMA, schema + " " * (MAX_SOURCE_CHARS - len(schema))))
    tracker.add(1, guide)
    tracker.add(2, guide)
    for request_id, missing in [(3, guide), (4, never)]:
        with pytest.raises(QueueTimeoutError, match="not kept any more"):
            tracker.add(request_id, missing)
    assert tracker.masks([1, 2, 3, 4])[0] == (1, 2)
    assert compiler.compile(guide) is not compiled[0] and compiled[0] is compiled[1]


def test_what_is_never_taken_is_forgotten(compiler: GuideCompiler) -> None:
    first, second, third = (compiler.compile(Guide(GuideKind.REGEX, letter)) for letter in "xyz")
    handover = Handover(max_guides=2)
    for compiled in (first, second, first, third):
        handover.give(compiled)
    assert handover.take(second.guide) is None
    assert [handover.take(first.guide) for _ in range(3)] == [first, first, None]
    assert handover.take(third.guide) is third
    expiring = Handover(kept_s=0.0)
    expiring.give(first)
    assert expiring.take(first.guide) is None


def test_thirty_two_threads_compile_at_once(compiler: GuideCompiler) -> None:
    names = [list(SCHEMAS)[i % 20] for i in range(96)]
    with ThreadPoolExecutor(32) as pool:
        masks = list(pool.map(lambda n: allowed_tokens(compiler.compile(schema_guide(n)).matcher(), VOCAB), names))
    for name, mask in zip(names, masks, strict=True):
        assert mask == allowed_tokens(compiler.compile(schema_guide(name)).matcher(), VOCAB)


def test_a_guide_is_compiled_once(compiler: GuideCompiler) -> None:
    assert compiler.compile(schema_guide("flat")) is compiler.compile(schema_guide("flat"))


def test_the_library_is_loaded_by_the_first_guide_alone() -> None:
    code = (
        "import sys, nereid.engine, nereid.guided.tracker\n"
        "assert not {'llguidance', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
