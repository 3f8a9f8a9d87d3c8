"""Engines that keep the logprobs of their steps, and how these are compared with transformers'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from nereid.batch import SchedulerOutput, StepResult
from nereid.request import TokenLogprobs
from tests.conftest import TOLERANCES
from tests.engine.tiny import SteppedEngine


@dataclass
class TellingEngine(SteppedEngine):
    """Keeps what its steps tell of logprobs, by request."""

    outputs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompts: dict[int, dict[int, TokenLogprobs]] = field(default_factory=dict)

    def compute(self, plan: SchedulerOutput) -> StepResult:
        result = super().compute(plan)
        for token in result.sampled:
            if token.logprobs is not None:
                self.outputs.setdefault(token.request_id, []).append(token.logprobs)
        for entry in result.prompt_logprobs:
            told = self.prompts.setdefault(entry.request_id, {})
            told |= dict(enumerate(entry.logprobs, entry.start))
        return result


def check_logprobs(told: Iterable[TokenLogprobs], tokens: Iterable[int], logits: torch.Tensor, count: int) -> None:
    """Against transformers' logits, one row a token."""
    bound = TOLERANCES["logprobs_float32"]
    for entry, token, own in zip(told, tokens, logits.log_softmax(dim=1), strict=True):
        assert entry.token_id == token and abs(entry.logprob - float(own[token])) < bound
        above = int((own > own[token] + bound).sum())
        assert above < entry.rank <= int((own > own[token] - bound).sum()) + 1
        best = own.topk(count)
        assert len(entry.top) == count
        for (best_id, value), expected in zip(entry.top, best.values.tolist(), strict=True):
            assert abs(value - expected) < bound and abs(float(own[best_id]) - value) < bound
