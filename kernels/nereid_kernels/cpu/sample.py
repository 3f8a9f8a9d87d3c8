"""sample on the CPU: all rows at once from their best blocks, and a whole row only where those do not do.

A row is cut into blocks of 32 tokens. What is at least the m-th largest of the blocks' maxima lies in the m blocks with
the largest: they hold the row's best m tokens, found in one pass, without a sort. Rows whose survivors reach beyond
them are looked at whole, few at a time, so that what is computed of them stays in the processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nereid_kernels.cpu.race import race
from nereid_kernels.draw_noise import GREEDY_TEMPERATURE, gumbel

_BLOCK = 32  # tokens
_NUM_BLOCKS, _MOST_BLOCKS = 80, 320
_TOKENS = 200_000  # of whole rows at a time
_SMALLEST = -700.0  # exp of it is next to nothing, and still a normal number: others are slow
_ROUNDING = 1e-4  # of a sum in float32, relative; it is far smaller
_BINS, _FAR = 1024, -40.0  # of scores below this next to no mass is left


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are not greedy. logits: [all rows, vocab].  index: [rows], which of them.  top: [rows], largest logit.

    The others: [rows], the parameters.
    """

    logits: Tensor
    index: Tensor
    top: Tensor
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor

    def parts(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """The indices of the rows that are chosen, few at a time."""
        index, size = chosen.nonzero()[:, 0], max(1, _TOKENS // self.logits.shape[1])
        return tuple(index[start : start + size] for start in range(0, len(index), size))

    def scores(self, chosen: Tensor) -> Tensor:
        """[chosen, vocab], of a few rows."""
        return (self.logits[self.index[chosen]] - self.top[chosen, None]).div_(self.temperature[chosen, None])


@dataclass(frozen=True, slots=True)
class _Candidates:
    """A row's best tokens. scores, ids: [rows, candidates], best first; -inf where a row has fewer.

    floor: [rows]; every token whose score is above it is a candidate. -inf: all that can be drawn are.
    """

    scores: Tensor
    ids: Tensor
    floor: Tensor

    def complete(self, bound: Tensor) -> Tensor:
        """Whether no token at or above bound [rows] is missing: [rows]."""
        return (bound > self.floor) | (self.floor == -torch.inf)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `nereid_kernels.sample.greedy`."""
    rows = logits.numpy()  # NumPy's argmax, the first of equals with NaN over all, reads as fast as the cache gives
    best = rows.argmax(axis=1)
    sound = np.isfinite(rows[np.arange(len(rows)), best])
    return torch.from_numpy(best * sound), torch.from_numpy(sound)


def sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab].  The others: [rows].  Returns token ids [rows] int64 and sound [rows] bool."""
    maxima = _block_maxima(logits)
    top, block = maxima.max(dim=1)  # the first of equals; NaN wins over all
    ids, values = _tokens_of(logits, block[:, None])
    tokens = ids.gather(1, values.argmax(dim=1, keepdim=True))[:, 0]
    sound = top.isfinite()
    random = (sound & (temperature >= GREEDY_TEMPERATURE)).nonzero()[:, 0]
    if len(random):
        columns = (column[random] for column in (top, temperature, min_p, top_k, top_p, keys))
        tokens[random] = _draw(_Rows(logits, random, *columns), maxima[random])
    return tokens.masked_fill_(~sound, 0), sound


def _block_maxima(logits: Tensor) -> Tensor:
    """[rows, blocks]; the last block may be short."""
    blocks = logits.shape[1] // _BLOCK
    whole = blocks * _BLOCK
    maxima = logits[:, :whole].view(len(logits), blocks, _BLOCK).amax(dim=2)
    if whole == logits.shape[1]:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(dim=1, keepdim=True)), dim=1)


def _tokens_of(logits: Tensor, blocks: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and logits of blocks [rows, blocks], both [rows, tokens]; -inf past the vocabulary.

    index: [rows], the rows of logits where they are not all of them in order.
    """
    vocab = logits.shape[1]
    ids = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    short = vocab % _BLOCK > 0
    within = ids.clamp(max=vocab - 1) if short else ids
    if index is None or len(index) == len(logits):  # noqa: SIM108
        values = logits.gather(1, within)  # quicker
    else:
        values = logits[index[:, None], within]
    return ids, values.masked_fill_(ids >= vocab, -torch.inf) if short else values


def _draw(rows: _Rows, maxima: Tensor) -> Tensor:
    """Tokens [rows]."""
    candidates = _candidates(rows, maxima)
    bound = _lower_bound(rows, candidates)
    noisy = candidates.scores.double() + gumbel(rows.keys[:, None], candidates.ids)
    best, place = noisy.masked_fill_(candidates.scores < bound[:, None], -torch.inf).max(dim=1)
    tokens = candidates.ids.gather(1, place[:, None])[:, 0]
    for chosen in rows.parts(~candidates.complete(bound)):
        tokens[chosen] = race(rows.scores(chosen), bound[chosen], best[chosen], rows.keys[chosen])
    return tokens


def _candidates(rows: _Rows, maxima: Tensor) -> _Candidates:
    vocab, num_blocks = rows.logits.shape[1], maxima.shape[1]
    kept = rows.top_k[rows.top_k < vocab]
    # One more than top_k keeps: the last of those is then above the floor, but for ties.
    wanted = max(_NUM_BLOCKS, int(kept.max()) + 1 if len(kept) else 0)
    best = maxima.topk(min(wanted, _MOST_BLOCKS, num_blocks), dim=1)
    ids, values = _tokens_of(rows.logits, best.indices, rows.index)
    whole = best.indices.shape[1] == num_blocks
    floor = torch.full_like(rows.top, -torch.inf) if whole else best.values[:, -1]
    most = int((values >= floor[:, None]).sum(dim=1).max())
    values, places = values.topk(most, dim=1)
    temperature = rows.temperature[:, None]
    scores = (values - rows.top[:, None]).div_(temperature)
    return _Candidates(scores, ids.gather(1, places), (floor - rows.top).div_(rows.temperature))


def _lower_bound(rows: _Rows, candidates: _Candidates) -> Tensor:
    """The smallest score [rows] that survives min_p, top_k and top_p."""
    bound = rows.min_p.double().log().float()
    vocab, num_candidates = rows.logits.shape[1], candidates.scores.shape[1]
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    kth = candidates.scores.gather(1, (rows.top_k.long() - 1).clamp(0, num_candidates - 1)[:, None])[:, 0]
    beyond = limited & ((rows.top_k > num_candidates) | ~candidates.complete(kth))
    for chosen in rows.parts(beyond):
        place = rows.top_k[chosen].long() - 1
        kth[chosen] = rows.scores(chosen).topk(int(place.max()) + 1, dim=1).values.gather(1, place[:, None])[:, 0]
    bound = torch.where(limited, torch.maximum(bound, kth), bound)
    if bool((rows.top_p < 1.0).any()):
        bound = torch.where(rows.top_p < 1.0, _top_p_bound(rows, candidates, bound), bound)
    return bound


def _top_p_bound(rows: _Rows, candidates: _Candidates, bound: Tensor) -> Tensor:
    """The score [rows] of the last token of the smallest set of survivors that holds top_p of their mass."""
    scores, top_p = candidates.scores, rows.top_p.double()
    mass = torch.where(scores >= bound[:, None], scores.double().clamp_(min=_SMALLEST).exp_(), 0.0).cumsum(dim=1)
    total = mass[:, -1].clone()
    partial = ~candidates.complete(bound) & (top_p < 1.0)
    for chosen in rows.parts(partial):
        total[chosen] = _mass(rows.scores(chosen), bound[chosen]).double()
    # float32 leaves no doubt about most rows: a total that is a little smaller or larger leads to the same token.
    first, last = (_place(mass, top_p * total * factor) for factor in (1 - _ROUNDING, 1 + _ROUNDING))
    doubt = partial & ((first != last) | (last == mass.shape[1]))
    for chosen in rows.parts(doubt):
        total[chosen] = _mass(rows.scores(chosen).double(), bound[chosen])
    place = _place(mass, top_p * total)
    beyond = place == mass.shape[1]
    lowest = scores.gather(1, place.clamp(max=mass.shape[1] - 1)[:, None])[:, 0]
    # Beyond the candidates: by rounding, where all survivors are candidates, or as there are more.
    result = torch.where(beyond, bound, torch.maximum(lowest, bound))
    for row in (beyond & partial).nonzero()[:, 0]:
        result[row] = _select(rows.scores(row[None])[0], bound[row], top_p[row] * total[row])
    return result


def _place(mass: Tensor, wanted: Tensor) -> Tensor:
    """How many of the ascending masses [rows, candidates] do not reach `wanted` [rows]: [rows]."""
    return torch.searchsorted(mass, wanted[:, None])[:, 0]


def _mass(scores: Tensor, bound: Tensor) -> Tensor:
    """The sum of exp(score) over the scores [rows, vocab] not below bound [rows]: [rows], in the dtype of scores."""
    weights = scores.clamp(min=_SMALLEST).exp_()
    if bool((bound > -torch.inf).any()):
        weights.masked_fill_(scores < bound[:, None], 0.0)
    return weights.sum(dim=1)


def _select(scores: Tensor, bound: Tensor, wanted: Tensor) -> Tensor:
    """The score of the last of the fewest best survivors that hold the mass `wanted`: [].

    scores: [vocab].  Tokens fall into bins by their distance to the best; only that in which the mass is reached is
    sorted.
    """
    reach = scores.clamp(min=bound.clamp(min=_FAR).item())
    bins = reach.mul_((_BINS - 1) / reach.min().clamp(max=-1e-30)).int()
    weights = scores.double().clamp_(min=_SMALLEST).exp_().masked_fill_(scores < bound, 0.0)
    mass = torch.bincount(bins, weights, minlength=_BINS).cumsum(0)
    found = int((mass < wanted).sum().clamp(max=_BINS - 1))
    members = scores[bins == found]
    ordered = members[members >= bound].sort(descending=True).values
    reached = ordered.double().exp_().cumsum(0) + (mass[found - 1] if found else 0.0)
    return ordered[(reached < wanted).sum().clamp(max=len(ordered) - 1)]
