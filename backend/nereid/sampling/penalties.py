"""PenaltyState: which tokens a request with penalties has seen, and how often it generated each. Owns these counts.

Kept of such requests alone, as lists of the different tokens, which are far shorter than a vocabulary: a token drawn
is one number counted up, and a step reads and writes nothing but the logits of tokens that were seen. A request is
known by its id; ids outside the vocabulary, which have no logit, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid.request import SamplingParams
from nereid_kernels.penalties import apply_penalties


def has_penalty(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


@dataclass(slots=True)
class _Seen:
    """One request. entries: token id -> its place in the slot's lists."""

    slot: int
    scales: tuple[float, float, float]
    entries: dict[int, int]


class PenaltyState:
    """Requests with penalties, each in a slot: a row of both tensors [slots, entries]."""

    def __init__(self, vocab_size: int, backend: str) -> None:
        """backend: of `nereid_kernels.backends`."""
        self._vocab_size = vocab_size
        self._backend = backend
        self._requests: dict[int, _Seen] = {}
        self._free: list[int] = []
        self._ids = torch.zeros(0, 0, dtype=torch.int64)
        self._counts = torch.zeros(0, 0, dtype=torch.int32)

    def add(self, request_id: int, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        """Know a request that has penalties, before its first token. The prompt counts for repetition alone."""
        counted = prompt if sampling.repetition_penalty != 1.0 else ()
        tokens = [token for token in dict.fromkeys(counted) if 0 <= token < self._vocab_size]
        scales = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._make_room(1, len(tokens))
        slot = self._free.pop()
        self._requests[request_id] = _Seen(slot, scales, {token: place for place, token in enumerate(tokens)})
        self._ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self._counts[slot] = 0

    def remove(self, request_id: int) -> None:
        """Forget a request, where it is known."""
        if seen := self._requests.pop(request_id, None):
            self._free.append(seen.slot)

    def count(self, drawn: Iterable[tuple[int, int]]) -> None:
        """Count drawn tokens, each with its request's id; those of requests without penalties are passed over."""
        slots, places, tokens = [], [], []
        for request_id, token in drawn:
            if seen := self._requests.get(request_id):
                slots.append(seen.slot)
                places.append(seen.entries.setdefault(token, len(seen.entries)))
                tokens.append(token)
        if slots:
            self._make_room(0, max(places) + 1)
            index = (torch.tensor(slots), torch.tensor(places))
            self._ids[index] = torch.tensor(tokens)
            self._counts[index] += 1

    def apply(self, logits: Tensor, request_ids: Sequence[int]) -> None:
        """Penalise logits [rows, vocab] in place; row i is of request_ids[i]."""
        rows = [(row, self._requests.get(request_id)) for row, request_id in enumerate(request_ids)]
        chosen = [(row, seen) for row, seen in rows if seen and seen.entries]
        if not chosen:
            return
        slots = torch.tensor([seen.slot for _, seen in chosen])
        lengths = torch.tensor([len(seen.entries) for _, seen in chosen])[:, None]
        places = torch.arange(int(lengths.max())).expand(len(chosen), -1)
        # Shorter lists are filled up with their own first entry: it is written twice, with the same value.
        index = (slots[:, None], torch.where(places < lengths, places, 0))
        scales = torch.tensor([seen.scales for _, seen in chosen], dtype=torch.float32).T.contiguous()
        where = (torch.tensor([row for row, _ in chosen])[:, None], self._ids[index])
        values, counts = logits[where], self._counts[index]
        seen_all = torch.ones_like(counts, dtype=torch.bool)  # of what is in the lists; nothing else is listed
        apply_penalties(values, counts, seen_all, *scales, backend=self._backend)
        logits[where] = values

    def _make_room(self, slots: int, entries: int) -> None:
        """At least `slots` free slots, and `entries` places in each; sizes double, so that copies are few."""
        have_slots, have_entries = self._ids.shape
        more_slots = max(4, have_slots) if len(self._free) < slots else 0
        more_entries = max(entries, 2 * have_entries) - have_entries if entries > have_entries else 0
        if more_slots or more_entries:
            grown = (0, more_entries, 0, more_slots)
            self._ids = torch.nn.functional.pad(self._ids, grown)
            self._counts = torch.nn.functional.pad(self._counts, grown)
            self._free += range(have_slots, have_slots + more_slots)
