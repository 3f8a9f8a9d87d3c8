"""Sampler: one token a row from a batch of logits, each row by its own parameters. Pure functions, no state.

A token is argmax(log p + Gumbel noise) over the candidates that survive min_p, top_k and top_p; greedy rows take the
plain argmax, the lowest id where two are equal. Invariant: a row's token depends on its own logits, parameters and
key alone. Order of truncation as in vLLM: temperature, min_p, top_k, top_p of what is left; ties at a bound survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nereid_kernels.reference.noise import gumbel
from nereid_kernels.sample import sample as sample_rows

# Most likely tokens of a row that are looked at first. What survives truncation nearly always lies among them.
_NUM_CANDIDATES = 256
# Below this a temperature is greedy: every gap between two logits of a model is larger than its noise.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Parameters of one row. key: of its noise.  banned: token ids that must not be drawn (stops before min_tokens)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int
    banned: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], backend: str = "cpu") -> tuple[list[int], list[bool]]:
    """Token ids, and whether each row's logits were sound (no NaN, no infinity at the top).

    logits: [rows, vocabulary] float32; changed in place where a row bans tokens.  backend: "cpu", or "triton_lang",
    which draws the same tokens by a kernel.
    """
    for index, row in enumerate(rows):
        if row.banned:
            logits[index, list(row.banned)] = -torch.inf
    if backend == "triton_lang":
        return _sample_by_kernel(logits, rows)
    top, tokens = logits.max(dim=1)  # the first of equals; NaN wins over all
    sound = top.isfinite().tolist()
    random = [index for index, row in enumerate(rows) if sound[index] and not row.greedy]
    if random:
        tokens[random] = _draw(logits[random] - top[random, None], [rows[index] for index in random])
    return tokens.tolist(), sound


def _sample_by_kernel(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[bool]]:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    tokens, sound = sample_rows(
        logits,
        column([row.temperature for row in rows], torch.float32),
        column([row.min_p for row in rows], torch.float64),
        column([min(row.top_k, logits.shape[1]) for row in rows], torch.int32),
        column([row.top_p for row in rows], torch.float64),
        column([row.key for row in rows], torch.int64),
        backend="triton_lang",
    )
    return tokens.tolist(), sound.tolist()


def _draw(shifted: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Tokens [rows] from logits whose largest is 0."""
    device, vocab_size = shifted.device, shifted.shape[1]
    temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    scores = shifted.div_(temperature.float().to(device)[:, None])
    keys = torch.tensor([[row.key] for row in rows], dtype=torch.int64, device=device)
    top_scores, top_ids = scores.topk(min(_NUM_CANDIDATES, vocab_size), dim=1)
    bound = _lower_bound(scores, top_scores, rows)
    # Rows where the last candidate still survives: others may, too.
    wide = bound <= top_scores[:, -1] if top_scores.shape[1] < vocab_size else torch.zeros_like(bound, dtype=torch.bool)
    noisy = (top_scores.double() + gumbel(keys, top_ids)).masked_fill(top_scores < bound[:, None], -torch.inf)
    tokens = top_ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
    all_ids = torch.arange(vocab_size, device=device)
    for index in wide.nonzero()[:, 0].tolist():
        ids = all_ids[scores[index] >= bound[index]]
        noise = gumbel(keys[index], ids)
        tokens[index] = ids[(scores[index, ids].double() + noise).argmax()]
    return tokens


def _lower_bound(scores: torch.Tensor, top_scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The smallest score [rows] that survives min_p, top_k and top_p."""
    min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float64)
    bound = min_p.log().float().to(scores.device)
    num_candidates = top_scores.shape[1]
    for index, row in enumerate(rows):
        if 0 < row.top_k < scores.shape[1]:
            in_reach = row.top_k <= num_candidates
            kth = top_scores[index, row.top_k - 1] if in_reach else scores[index].topk(row.top_k).values[-1]
            bound[index] = torch.maximum(bound[index], kth)
    needs_top_p = [index for index, row in enumerate(rows) if row.top_p < 1.0]
    if needs_top_p:
        top_p = torch.tensor([rows[index].top_p for index in needs_top_p], dtype=torch.float64, device=scores.device)
        bound[needs_top_p] = _top_p_bound(scores[needs_top_p], top_scores[needs_top_p], bound[needs_top_p], top_p)
    return bound


def _top_p_bound(
    scores: torch.Tensor, top_scores: torch.Tensor, bound: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The score [rows] of the last token of the smallest set of survivors that holds top_p of their mass."""
    weights = torch.where(scores >= bound[:, None], scores.double().exp(), 0.0)
    wanted = top_p * weights.sum(dim=1)
    reached = top_scores.double().exp().cumsum(dim=1) >= wanted[:, None]
    first = reached.int().argmax(dim=1)
    result = torch.maximum(top_scores.gather(1, first[:, None])[:, 0], bound)
    for index in (~reached[:, -1]).nonzero()[:, 0].tolist():
        ordered = scores[index, scores[index] >= bound[index]].sort(descending=True).values
        place = int((ordered.double().exp().cumsum(0) < wanted[index]).sum())
        result[index] = ordered[min(place, len(ordered) - 1)]
    return result
