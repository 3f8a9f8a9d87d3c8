"""Requests that a real Sampler draws for, from logits that a test makes up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nereid.batch import GuideMasks, NewRequest, SampledToken, SchedulerOutput
from nereid.request import SamplingParams
from nereid.sampling.sampler import Sampler, SamplingRow

EOS = (2, 3)


class Draws:
    """A request a row, ids from 0; token_ids: prompt and output of each."""

    def __init__(self, vocab: int, *rows: SamplingParams, prompt: Sequence[int] = (0,)) -> None:
        self._vocab = vocab
        self._sampler = Sampler(EOS, vocab)
        self.token_ids: list[list[int]] = []
        self._take_in(rows, prompt, finished=())

    def _take_in(self, rows: Sequence[SamplingParams], prompt: Sequence[int], finished: tuple[int, ...]) -> None:
        new = tuple(NewRequest(index, tuple(prompt), sampling) for index, sampling in enumerate(rows))
        self._sampler.apply(SchedulerOutput(1, new, (), finished))
        self.token_ids = [list(prompt) for _ in rows]

    def replace(self, *rows: SamplingParams, prompt: Sequence[int]) -> None:
        """Other requests in place of these."""
        self._take_in(rows, prompt, finished=tuple(range(len(self.token_ids))))

    def next(
        self, logits: torch.Tensor, masks: GuideMasks | None = None, *, copy: bool = True
    ) -> tuple[SampledToken, ...]:
        """One token a row, from logits [rows, vocab]."""

        def given() -> GuideMasks:
            assert masks is not None, "masks were asked for"
            return masks

        rows = [SamplingRow(index, tokens) for index, tokens in enumerate(self.token_ids)]
        sampled = self._sampler.draw(logits.clone() if copy else logits, rows, given)
        for token in sampled:
            if token.fault is None:
                self.token_ids[token.request_id].append(token.token_id)
        return sampled

    def tokens(self, logits: torch.Tensor, masks: GuideMasks | None = None) -> list[int]:
        """The ids of `next`, where every row draws one."""
        sampled = self.next(logits, masks)
        assert all(token.fault is None for token in sampled), sampled
        return [token.token_id for token in sampled]

    def force(self, *token_ids: int) -> None:
        """Let every row draw these, one after the other: no other token has any probability."""
        for token in token_ids:
            logits = torch.full((len(self.token_ids), self._vocab), -torch.inf)
            logits[:, token] = 0.0
            assert set(self.tokens(logits)) == {token}
