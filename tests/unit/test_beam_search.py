"""The beam search alone, against a search over all texts: where beams are as many as there are texts, it is exact."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from nereid.request import Branching, FinishReason
from nereid.scheduling.beam_search import BeamSearch, Hypothesis, num_candidates

STOP, VOCAB = 0, 4
Tokens = tuple[int, ...]


def logprobs_after(tokens: Tokens) -> list[float]:
    """Of each next token: a function of the tokens before it."""
    weights = [random.Random(f"{tokens} {token}").random() + 0.01 for token in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search(branching: Branching, max_tokens: int, min_tokens: int = 0) -> tuple[list[Hypothesis], int]:
    """The best hypotheses, and how many steps it took."""
    beams = BeamSearch(branching, frozenset({STOP}), min_tokens, max_tokens)
    carried: list[Tokens] = [()]
    count = num_candidates(branching.beam_width, 1)
    for step in range(1, max_tokens + 1):
        found = []
        for tokens in carried:
            ranked = sorted(enumerate(logprobs_after(tokens)), key=lambda pair: -pair[1])
            found.append(ranked[:count])
        moves = beams.advance(found)
        if not moves:
            return beams.best(), step
        carried = [(*carried[move.parent], move.token_id) for move in moves]
        assert [tuple(h.token_ids) for h in beams.live] == carried
    raise AssertionError("the search went on after max_tokens")


def all_texts(max_tokens: int, min_tokens: int) -> list[tuple[Tokens, float]]:
    """Every text that can be an answer, with the sum of its logprobs."""
    texts = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            stops = tokens[-1] == STOP
            if STOP not in tokens[:-1] and (stops or length == max_tokens) and (not stops or length > min_tokens):
                texts.append((tokens, sum(logprobs_after(tokens[:i])[tokens[i]] for i in range(length))))
    return texts


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_a_search_that_drops_nothing_finds_the_best_of_all_texts(length_penalty: float, min_tokens: int) -> None:
    """No live hypothesis is dropped with as many beams as there are texts; nor does the search end before them."""
    texts = all_texts(4, min_tokens)
    branching = Branching(20, 1, len(texts), length_penalty)
    found, _ = search(branching, 4, min_tokens)
    best = sorted(texts, key=lambda text: -text[1] / len(text[0]) ** length_penalty)[:20]
    assert [tuple(h.token_ids) for h in found] == [tokens for tokens, _ in best]
    assert [h.total for h in found] == pytest.approx([total for _, total in best], rel=1e-12)
    reasons = [FinishReason.STOP if tokens[-1] == STOP else FinishReason.LENGTH for tokens, _ in best]
    assert [h.reason for h in found] == reasons


def test_early_stopping_ends_as_soon_as_enough_are_finished() -> None:
    late, many = search(Branching(2, 1, 2, 3.0), 40)
    early, few = search(Branching(2, 1, 2, 3.0, early_stopping=True), 40)
    assert few < many <= 40 and len(early) == len(late) == 2
    assert early[0].total / early[0].length ** 3 <= late[0].total / late[0].length ** 3


def test_what_was_broken_off_has_finished_ones_before_the_others() -> None:
    beams = BeamSearch(Branching(3, 1, 3), frozenset({STOP}), 0, 10)
    assert [h.token_ids for h in beams.best()] == [[]]
    beams.advance([[(1, -0.1), (STOP, -0.2), (2, -0.3), (3, -9.0)]])
    assert [h.token_ids for h in beams.best()] == [[STOP], [1], [2]]
    assert [h.reason for h in beams.best()] == [FinishReason.STOP, None, None]


def test_equal_scores_go_to_the_earlier_hypothesis_and_the_better_place() -> None:
    beams = BeamSearch(Branching(2, 1, 2), frozenset(), 0, 10)
    assert [m.token_id for m in beams.advance([[(7, -1.0), (5, -1.0), (6, -1.0)]])] == [7, 5]
    moves = beams.advance([[(8, -1.0), (9, -1.0)], [(1, -1.0), (2, -1.0)]])
    assert [(move.parent, move.token_id) for move in moves] == [(0, 8), (0, 9)]


def test_a_search_without_a_token_left_ends() -> None:
    beams = BeamSearch(Branching(2, 1, 2), frozenset({STOP}), 1, 10)
    assert beams.advance([[(STOP, -0.1), (1, -math.inf)]]) == []
    assert [h.token_ids for h in beams.best()] == [[]]


def test_tokens_are_told_with_their_ranks_and_the_best_ones() -> None:
    beams = BeamSearch(Branching(2, 1, 2), frozenset(), 0, 2)
    beams.advance([[(4, -0.5), (3, -0.9), (2, -0.9), (1, -3.0)]])
    beams.advance([[(1, -9.0)], [(1, -0.1)]])
    best = beams.best()[0]
    assert best.token_ids == [3, 1] and best.total == pytest.approx(-1.0)
    first, second = best.logprobs(2)
    assert (first.token_id, first.logprob, first.rank, first.top) == (3, -0.9, 2, ((4, -0.5), (3, -0.9)))
    assert (second.token_id, second.rank, second.top) == (1, 1, ((1, -0.1),))
