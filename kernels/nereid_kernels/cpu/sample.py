"""sample on the CPU: all rows at once, and a look at a row's whole vocabulary only where its best tokens do not do."""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.draw_noise import GREEDY_TEMPERATURE, gumbel

# Most likely tokens of a row that are looked at first. What survives truncation nearly always lies among them.
_NUM_CANDIDATES = 256


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab].  The others: [rows].  Returns token ids [rows] int64 and sound [rows] bool."""
    top, tokens = logits.max(dim=1)  # the first of equals; NaN wins over all
    sound = top.isfinite()
    random = (sound & (temperature >= GREEDY_TEMPERATURE)).nonzero()[:, 0]
    if len(random):
        scores = (logits[random] - top[random, None]).div_(temperature[random, None])
        tokens[random] = _draw(scores, min_p[random], top_k[random], top_p[random], keys[random])
    return tokens.masked_fill_(~sound, 0), sound


def _draw(scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """Tokens [rows] from scores [rows, vocab], whose largest is 0."""
    vocab = scores.shape[1]
    top_scores, top_ids = scores.topk(min(_NUM_CANDIDATES, vocab), dim=1)
    bound = _lower_bound(scores, top_scores, min_p, top_k, top_p)
    # Rows where the last candidate still survives: others may, too.
    wide = bound <= top_scores[:, -1] if top_scores.shape[1] < vocab else torch.zeros_like(bound, dtype=torch.bool)
    noisy = top_scores.double() + gumbel(keys[:, None], top_ids)
    noisy.masked_fill_(top_scores < bound[:, None], -torch.inf)
    tokens = top_ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
    for row in wide.nonzero()[:, 0].tolist():
        ids = (scores[row] >= bound[row]).nonzero()[:, 0]
        tokens[row] = ids[(scores[row, ids].double() + gumbel(keys[row], ids)).argmax()]
    return tokens


def _lower_bound(scores: Tensor, top_scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest score [rows] that survives min_p, top_k and top_p."""
    bound = min_p.double().log().float()
    vocab, num_candidates = scores.shape[1], top_scores.shape[1]
    for row, k in enumerate(top_k.tolist()):
        if 0 < k < vocab:
            kth = top_scores[row, k - 1] if k <= num_candidates else scores[row].topk(k).values[-1]
            bound[row] = torch.maximum(bound[row], kth)
    cut = (top_p < 1.0).nonzero()[:, 0]
    if len(cut):
        bound[cut] = _top_p_bound(scores[cut], top_scores[cut], bound[cut], top_p[cut].double())
    return bound


def _top_p_bound(scores: Tensor, top_scores: Tensor, bound: Tensor, top_p: Tensor) -> Tensor:
    """The score [rows] of the last token of the smallest set of survivors that holds top_p of their mass."""
    weights = torch.where(scores >= bound[:, None], scores.double().exp(), 0.0)
    wanted = top_p * weights.sum(dim=1)
    reached = top_scores.double().exp().cumsum(dim=1) >= wanted[:, None]
    first = reached.int().argmax(dim=1)
    result = torch.maximum(top_scores.gather(1, first[:, None])[:, 0], bound)
    for row in (~reached[:, -1]).nonzero()[:, 0].tolist():
        ordered = scores[row, scores[row] >= bound[row]].sort(descending=True).values
        place = int((ordered.double().exp().cumsum(0) < wanted[row]).sum())
        result[row] = ordered[min(place, len(ordered) - 1)]
    return result
