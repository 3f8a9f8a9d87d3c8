"""Logprobs of given logits: values, ranks, the best tokens, and the order of equal ones."""

from __future__ import annotations

import torch

from nereid.request import SamplingParams
from nereid.sampling.logprobs import token_logprobs
from tests.conftest import TOLERANCES
from tests.unit.draws import Draws


def test_values_and_ranks_equal_the_log_softmax() -> None:
    logits = torch.randn(70, 500, generator=torch.Generator().manual_seed(1)) * 6
    expected = logits.double().log_softmax(dim=1)
    tokens = torch.randint(0, 500, (70,)).tolist()
    counts = [index % 7 for index in range(70)]
    for index, told in enumerate(token_logprobs(logits, tokens, counts)):
        own = expected[index]
        assert told.token_id == tokens[index]
        assert abs(told.logprob - float(own[told.token_id])) < TOLERANCES["logprobs_float32"]
        assert told.rank == int((own > own[told.token_id]).sum()) + 1
        order = own.argsort(descending=True)[: counts[index]].tolist()
        assert [token for token, _ in told.top] == order
        assert all(abs(value - float(own[token])) < TOLERANCES["logprobs_float32"] for token, value in told.top)


def test_equal_ones_are_told_by_the_lowest_id_and_share_a_rank() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [290, 7, 100]] = 4.0
    logits[0, 150] = 9.0
    first, second = token_logprobs(logits, [100, 299], [3, 5])
    assert [token for token, _ in first.top] == [150, 7, 100] and first.rank == 2
    assert [token for token, _ in second.top] == [0, 1, 2, 3, 4] and second.rank == 1


def test_more_than_the_vocabulary_tells_all_of_it() -> None:
    (told,) = token_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), [0], [20])
    assert [token for token, _ in told.top] == [1, 2, 0] and told.rank == 3


def test_they_are_of_the_models_own_logits_whatever_the_request_changes() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    plain = SamplingParams(logprobs=50)
    changed = SamplingParams(
        logprobs=2, temperature=0.3, top_k=4, repetition_penalty=1.9, logit_bias=((9, 30.0),), bad_words=((4,),)
    )
    tokens = Draws(50, plain, SamplingParams(), changed, prompt=(1, 2)).next(logits)
    assert tokens[1].logprobs is None
    assert tokens[2].token_id == 9 and tokens[2].logprobs is not None
    assert tokens[2].logprobs == token_logprobs(logits[2:], [9], [2])[0]
    assert tokens[0].logprobs == token_logprobs(logits[:1], [tokens[0].token_id], [50])[0]
