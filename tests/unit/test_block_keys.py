"""Names of blocks: equal where everything is equal, and never otherwise."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.kv_cache.block_keys import NAME_LENGTH, child_name, root_name

ROOT = root_name("model", None, None)


def test_names_are_the_same_in_every_process() -> None:
    """They name files: to change these two is to void every directory of stored blocks."""
    assert ROOT == "31cae1f28ce5bd41c299e8d389e6fd346aa8513da91a5d2bf42bf02be4962f40"
    assert child_name(ROOT, (1, 2, 3), 0) == "90322311ba4b0fa5f2c272740f998dadccd72d03409fbfebf7e40692d752e291"
    assert len(ROOT) == NAME_LENGTH


def test_salt_and_adapter_are_told_apart() -> None:
    parts = [
        ("org_1", "2345"), ("org_12345", ""), ("org_12345", None), (None, "org_12345"), ("", "org_12345"),
        ("x", None), (None, "x"), ("", "x"), ("x", ""), (None, None), ("", ""), (None, ""), ("", None),
        ("org_1\x002345", None), ("\ud800", None), ("0", None),
    ]  # fmt: skip
    names = {root_name(fingerprint, *pair) for fingerprint in ("model", "mode", "") for pair in parts}
    assert len(names) == 3 * len(parts)
    assert root_name("mode", "l", None) != root_name("model", "", None)


_TEXTS = st.none() | st.text(alphabet="ab\x00\x01", max_size=3)


@given(st.tuples(_TEXTS, _TEXTS), st.tuples(_TEXTS, _TEXTS))
def test_roots_are_equal_only_where_their_parts_are(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (root_name("", *one) == root_name("", *other)) == (one == other)


def test_everything_about_a_block_is_in_its_name() -> None:
    """Tokens that are equal modulo 256, 65536 or 2**32, fewer tokens, zeros at the end, another group or parent."""
    tokens = [(65, 1), (321, 1), (65 + (1 << 16), 1), (65 + (1 << 32), 1), (65,), (65, 1, 0), (1, 65), ()]
    parents = [ROOT, child_name(ROOT, (65,), 0), root_name("model", "salt", None)]
    cases = list(itertools.product(parents, tokens, (0, 1)))
    assert len({child_name(*case) for case in cases}) == len(cases)
    two_steps = child_name(child_name(ROOT, (1, 2), 0), (3, 4), 0)
    assert two_steps != child_name(child_name(ROOT, (1, 2, 3), 0), (4,), 0)


@pytest.mark.parametrize("parent", ["", "00", "g" * NAME_LENGTH, ROOT + "00"])
def test_a_parent_that_is_no_name_is_an_error(parent: str) -> None:
    with pytest.raises(ValueError):
        child_name(parent, (1,), 0)
