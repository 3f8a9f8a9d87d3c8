"""Sampling and logprobs in whole engines: random mixes of parameters against solo runs and against a plain reference,
logprobs against transformers, however the prompts are cut, batched and preempted.
"""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nereid.batch import GuideMasks
from nereid.request import Guide, GuideKind, Request, SamplingParams
from nereid.sampling.noise import noise_key
from nereid_kernels.draw_noise import GREEDY_TEMPERATURE, gumbel
from tests.conftest import TOLERANCES
from tests.engine.logprobs import TellingEngine, check_logprobs
from tests.engine.tiny import EOS, VOCAB, SteppedEngine, reference_logits


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Any of the parameters, each of them often enough beside any other."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB), rng.randint(1, most)))

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.3 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 1e-10, 0.5, 1.0, 1.0, 1.5, 30.0]),
        top_k=rng.choice([-1, 0, 1, 2, 20, VOCAB, VOCAB + 1]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.0]),
        min_p=rng.choice([0.0, 0.0, 0.02, 1.0]),
        seed=seed,
        repetition_penalty=sometimes(rng.choice([0.8, 1.3, 2.0]), 1.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        logit_bias=sometimes(tuple((token, rng.uniform(-20, 20)) for token in ids(5)), ()),
        allowed_token_ids=sometimes(ids(60), None),
        bad_words=sometimes(tuple(ids(2) for _ in range(80)), ()),
        max_tokens=6,
        min_tokens=rng.choice([0, 3]),
        stop_token_ids=sometimes(ids(30), ()),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 3, VOCAB + 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
    )


def plain_scores(logits: torch.Tensor, sampling: SamplingParams, prompt: tuple[int, ...], output: list[int]) -> Any:
    """What a row's token is the argmax of: [vocab] float64, one parameter after the other, by their definitions."""
    scores, tokens = logits.clone(), [*prompt, *output]
    for token in set(tokens):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = output.count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    banned = {word[-1] for word in sampling.bad_words if list(word[:-1]) == tokens[len(tokens) - len(word) + 1 :]}
    if sampling.allowed_token_ids is not None:
        banned |= set(range(VOCAB)) - set(sampling.allowed_token_ids)
    if len(output) < sampling.min_tokens:
        banned |= {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])}
    scores[list(banned)] = -torch.inf
    if sampling.temperature < GREEDY_TEMPERATURE:
        return scores.double()
    scores = (scores.double() - scores.max()) / sampling.temperature
    ordered = scores.exp().sort(descending=True).values
    bound = sampling.min_p
    if 0 < sampling.top_k < VOCAB:
        bound = max(bound, float(ordered[sampling.top_k - 1]))
    kept = ordered[ordered >= bound]
    mass = kept.cumsum(0) / kept.sum()
    if sampling.top_p < 1:
        bound = max(bound, float(kept[min(int((mass < sampling.top_p).sum()), len(kept) - 1)]))
    noise = gumbel(torch.tensor(noise_key(sampling.seed, 0, len(tokens))), torch.arange(VOCAB))
    return torch.where(scores.exp() >= bound, scores + noise, -torch.inf)


def near_tie(model: Any, request: Request, tokens: list[int]) -> bool:
    """Whether the last of these tokens was a close decision."""
    logits = reference_logits(model, request.prompt_token_ids, tokens)[-1]
    scores = plain_scores(logits, request.sampling, request.prompt_token_ids, tokens[:-1])
    gap = scores.topk(2).values.diff().abs()
    return bool(gap < TOLERANCES["identity_top_gap"])


def test_two_hundred_mixes_of_parameters_equal_their_solo_runs_and_the_definition(
    model: transformers.LlamaForCausalLM, directory: Path
) -> None:
    rng = random.Random(12)
    requests: list[Request] = []
    while len(requests) < 200:
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30)))
        sampling = random_params(rng, len(requests))
        banned = {word[0] for word in sampling.bad_words if len(word) == 1} | {EOS, *sampling.stop_token_ids}
        if sampling.allowed_token_ids is None or len(set(sampling.allowed_token_ids) - banned) > 3:
            requests.append(Request(len(requests), prompt, sampling, 0.0))
    solo = SteppedEngine(directory, {"block_size": 8, "max_num_seqs": 1}).run(requests)
    engine = TellingEngine(directory, {"block_size": 8, "num_blocks": 20, "max_num_batched_tokens": 100})
    together = engine.run(requests)
    assert engine.scheduler.num_preemptions > 0
    positions, ties = 0, []
    for request in requests:
        prompt, tokens = request.prompt_token_ids, solo[request.request_id]
        logits = reference_logits(model, prompt, tokens)
        scores = [plain_scores(row, request.sampling, prompt, tokens[:i]) for i, row in enumerate(logits)]
        drawn = [int(row.argmax()) for row in scores]
        for others in (together[request.request_id], drawn):
            differing = [i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b]
            if differing:
                assert near_tie(model, request, tokens[: differing[0] + 1]), (request, tokens, others)
                ties.append((request.request_id, differing[0]))
            else:
                assert tokens == others, request
        positions += len(tokens)
    print(f"{positions} positions compared, near ties: {ties or 'none'}")
    assert len(ties) <= max(1, TOLERANCES["identity_share"] * positions)


WAYS: list[dict[str, object]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 16},
    {"max_num_batched_tokens": 7},
    {"num_blocks": 27, "max_num_batched_tokens": 40},  # preempted
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_logprobs_of_outputs_and_prompts_equal_transformers(
    model: transformers.LlamaForCausalLM, directory: Path, settings: dict[str, object]
) -> None:
    rng = random.Random(3)
    requests = [
        Request(
            index,
            tuple(rng.randrange(3, VOCAB) for _ in range(length)),
            SamplingParams(
                temperature=1.0, top_k=9, seed=index, max_tokens=12, ignore_eos=True, repetition_penalty=1.2,
                logprobs=index, prompt_logprobs=5 - index,
            ),
            0.0,
        )
        for index, length in enumerate([1, 2, 30, 90, 17, 140])
    ]  # fmt: skip
    engine = TellingEngine(directory, {"block_size": 8, **settings})
    tokens = engine.run(requests)
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in settings)
    for request in requests:
        index, prompt = request.request_id, request.prompt_token_ids
        check_logprobs(
            engine.outputs[index], tokens[index], reference_logits(model, prompt, tokens[index]), count=index
        )
        told = engine.prompts.get(index, {})
        assert sorted(told) == list(range(1, len(prompt)))
        if told:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt])).logits[0, :-1]
            check_logprobs([told[i] for i in sorted(told)], prompt[1:], logits, count=5 - index)


def test_prompt_logprobs_are_computed_few_rows_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TellingEngine(directory)
    sizes: list[int] = []
    logits = engine.runner.model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(engine.runner.model, "logits", record)
    engine.run([Request(0, tuple(range(3, 203)), SamplingParams(max_tokens=1, prompt_logprobs=0), 0.0)])
    assert sizes == [64, 64, 64, 7, 1] and len(engine.prompts[0]) == 199


def test_min_tokens_holds_back_every_id_that_stops(directory: Path) -> None:
    """With three ids that end the output and nothing else to draw, the first comes at the first place allowed."""
    ends = (EOS, 30, 40)
    allowed = SamplingParams(allowed_token_ids=(*ends, 50), min_tokens=5, max_tokens=20, stop_token_ids=(30, 40))
    favoured = [((token, 100.0),) for token in ends]
    requests = [Request(i, (7, 8), replace(allowed, logit_bias=bias), 0.0) for i, bias in enumerate(favoured)]
    tokens = SteppedEngine(directory).run(requests)
    assert [tokens[i] for i in range(3)] == [[50] * 5 + [end] for end in ends]


def test_masks_are_waited_for_only_where_a_guided_row_samples(directory: Path) -> None:
    """`compute` of these engines fails where masks are asked for; a chunk of a guided prompt asks for none."""
    guided = SamplingParams(max_tokens=1, guide=Guide(GuideKind.REGEX, "x"))
    engine = SteppedEngine(directory, {"max_num_batched_tokens": 10})
    engine.scheduler.add(Request(0, tuple(range(3, 18)), guided, 0.0))
    engine.step()
    plan = engine.scheduler.schedule()
    words = [0] * 9
    words[6] = 1 << 8  # token 200
    masks = GuideMasks(plan.step, (0,), struct.pack("=9i", *words))
    assert [token.token_id for token in engine.runner.run(plan, lambda: masks).sampled] == [200]
