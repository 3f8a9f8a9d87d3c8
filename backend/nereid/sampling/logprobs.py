"""Logarithms of probabilities as a request may ask for them: of the model's own logits, before any change to them.

Pure functions. The log-softmax is taken in float32; tokens of equal probability are told in order of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nereid.request import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row: the token of token_ids, and its counts best ones.

    logits: [rows, vocab] float32, not changed; memory of as much again is taken for a moment.
    """
    total = logits.logsumexp(dim=1)
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])
    ranks = (logits > chosen).sum(dim=1) + 1
    logprobs: list[float] = (chosen[:, 0] - total).tolist()
    best: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if (most := min(max(counts), logits.shape[1])) > 0:
        values, ids = _best(logits, most)
        pairs = zip(ids.tolist(), (values - total[:, None]).tolist(), counts, strict=True)
        best = [tuple(zip(row_ids[:count], row[:count], strict=True)) for row_ids, row, count in pairs]
    return [TokenLogprobs(*told) for told in zip(token_ids, logprobs, ranks.tolist(), best, strict=True)]


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row and their ids, [rows, count], best first, equal ones by the lowest id."""
    values, ids = logits.topk(count, dim=1)
    # topk picks any of equal ones.
    for row in ((logits >= values[:, -1:]).sum(dim=1) > count).nonzero()[:, 0]:
        reached = (logits[row] >= values[row, -1]).nonzero()[:, 0]
        ids[row] = reached[logits[row, reached].sort(descending=True, stable=True).indices[:count]]
    ids = ids.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
