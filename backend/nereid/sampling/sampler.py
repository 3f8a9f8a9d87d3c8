"""Sampler: one token a row from a batch of logits, each row by its own request's parameters.

Owns what is kept of each request for its draws: parameters as numbers, rules about tokens, counts for penalties. The
order of changes is penalties, bias, masks; the draw itself, and how it truncates, is `nereid_kernels.sample`.
Invariants: a row's token depends on its own logits, parameters, tokens and seed alone; rows whose request changes
nothing are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid.batch import DrawFault, GuideMasks, NewRequest, SampledToken, SchedulerOutput
from nereid.request import SamplingParams, TokenLogprobs
from nereid.sampling.logprobs import token_logprobs
from nereid.sampling.masks import TokenRules, add_bias, forbid, keep_only
from nereid.sampling.noise import key_at, sequence_key
from nereid.sampling.penalties import PenaltyState, has_penalty
from nereid_kernels.grammar_mask import grammar_mask
from nereid_kernels.sample import greedy, sample


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A row to draw for. token_ids: prompt and output so far."""

    request_id: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Known:
    """A request. columns: temperature, min_p, top_k, top_p.  rules: None where it has none.  changes: its logits."""

    sampling: SamplingParams
    prompt_len: int
    columns: tuple[float, float, float, float]
    sequence_key: int
    rules: TokenRules | None
    changes: bool


class Sampler:
    """Requests by id, as far as the plans have told."""

    def __init__(self, eos_token_ids: Sequence[int], vocab_size: int, backend: str = "auto") -> None:
        """eos_token_ids: the model's.  backend: of `nereid_kernels.backends`; all draw the same tokens."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._backend = backend
        self._requests: dict[int, _Known] = {}
        self._penalties = PenaltyState(vocab_size, backend)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's news: forgotten requests and new ones."""
        for request_id in plan.finished_ids:
            del self._requests[request_id]
            self._penalties.remove(request_id)
        for new in plan.new_requests:
            self._add(new)

    def _add(self, new: NewRequest) -> None:
        sampling = new.sampling
        rules = TokenRules.of(sampling, self._eos_token_ids, self._vocab_size)
        penalised = has_penalty(sampling)
        if penalised:
            self._penalties.add(new.request_id, sampling, new.prompt_token_ids)
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        self._requests[new.request_id] = _Known(
            sampling,
            len(new.prompt_token_ids),
            (sampling.temperature, sampling.min_p, float(top_k), sampling.top_p),
            sequence_key(sampling.seed, new.sequence_index),
            None if rules.empty else rules,
            penalised or not rules.empty or sampling.guide is not None,
        )

    def draw(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: Callable[[], GuideMasks]
    ) -> tuple[SampledToken, ...]:
        """The next token of each row, or why there is none.

        logits: [rows, vocab] float32, the model's own; changed in place.  masks: waits for what the guides of these
        rows allow; asked for only where one has a guide.
        """
        known = [self._requests[row.request_id] for row in rows]
        told = [index for index, request in enumerate(known) if request.sampling.logprobs is not None]
        changes = any(request.changes for request in known)
        own = logits[told] if told and (changes or len(told) < len(rows)) else logits
        if changes:
            finite = logits.amax(dim=1).isfinite().tolist()  # before a mask can hide what is not
            self._change(logits, rows, known, masks)
        tokens, sound = self._sample(logits, rows, known)
        whole = finite if changes else sound
        logprobs = self._logprobs(own, [(index, tokens[index], known[index]) for index in told])
        sampled = []
        for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if sound[index] and whole[index]:
                sampled.append(SampledToken(row.request_id, token, logprobs=logprobs.get(index)))
            else:
                fault = DrawFault.NONE_LEFT if whole[index] else DrawFault.NOT_FINITE
                sampled.append(SampledToken(row.request_id, -1, fault))
        self._penalties.count((token.request_id, token.token_id) for token in sampled if token.fault is None)
        return tuple(sampled)

    def _change(
        self, logits: Tensor, rows: Sequence[SamplingRow], known: Sequence[_Known], masks: Callable[[], GuideMasks]
    ) -> None:
        self._penalties.apply(logits, [row.request_id for row in rows])
        add_bias(logits, [request.rules for request in known], self._backend)
        ruled = [(index, request.rules) for index, request in enumerate(known) if request.rules]
        keep_only(logits, [(index, rules.allowed) for index, rules in ruled if rules.allowed is not None])
        lists = []
        for index, rules in ruled:
            tokens = rows[index].token_ids
            found = rules.forbidden(tokens, len(tokens) - known[index].prompt_len)
            lists += [(index, ids) for ids in found]
        forbid(logits, lists)
        if any(request.sampling.guide for request in known):
            self._apply_guides(logits, rows, masks())

    def _apply_guides(self, logits: Tensor, rows: Sequence[SamplingRow], masks: GuideMasks) -> None:
        row_of = {row.request_id: index for index, row in enumerate(rows)}
        bitmask = torch.frombuffer(bytearray(masks.bitmask), dtype=torch.int32).view(len(masks.request_ids), -1)
        indices = torch.tensor([row_of.get(request_id, -1) for request_id in masks.request_ids])
        grammar_mask(logits, bitmask, indices, backend=self._backend)

    def _sample(
        self, logits: Tensor, rows: Sequence[SamplingRow], known: Sequence[_Known]
    ) -> tuple[list[int], list[bool]]:
        if all(request.sampling.greedy for request in known):
            tokens, sound = greedy(logits, backend=self._backend)
        else:
            tokens, sound = self._sample_any(logits, rows, known)
        return tokens.tolist(), sound.tolist()

    def _sample_any(
        self, logits: Tensor, rows: Sequence[SamplingRow], known: Sequence[_Known]
    ) -> tuple[Tensor, Tensor]:
        columns = torch.tensor([request.columns for request in known], dtype=torch.float64).T.contiguous()
        temperature, min_p, top_k, top_p = columns
        pairs = zip(rows, known, strict=True)
        keys = torch.tensor(
            [
                0 if request.sampling.greedy else key_at(request.sequence_key, len(row.token_ids))
                for row, request in pairs
            ]
        )
        return sample(logits, temperature.float(), min_p, top_k.int(), top_p, keys, backend=self._backend)

    @staticmethod
    def _logprobs(own: Tensor, drawn: Sequence[tuple[int, int, _Known]]) -> dict[int, TokenLogprobs]:
        """By row. own: [drawn, vocab], the model's logits.  drawn: row, token and request."""
        if not drawn:
            return {}
        counts = [request.sampling.logprobs or 0 for _, _, request in drawn]
        told = token_logprobs(own, [token for _, token, _ in drawn], counts)
        return dict(zip([row for row, _, _ in drawn], told, strict=True))
