"""What a request forbids and what it favours: token ids, and the writes by which they change a batch of logits.

Owns no state but what is fixed of a request when it comes (`TokenRules`). Each kind of change is one indexed write for
the whole batch. An id outside the vocabulary changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid.request import SamplingParams
from nereid_kernels.penalties import apply_bias

RowIds = tuple[int, Tensor]  # a row of logits, and token ids [ids] int64


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A request's rules about single tokens. The tensors: token ids, int64, of the vocabulary; None: no such rule.

    words: the last id of each word of several ids, with the ids before it, by the last of these.
    bias: float32, for bias_ids.
    """

    banned: Tensor | None
    allowed: Tensor | None
    stops: Tensor | None
    min_tokens: int
    words: dict[int, list[tuple[tuple[int, ...], int]]]
    bias_ids: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, sampling: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> TokenRules:
        def known(ids: Iterable[int]) -> list[int]:
            return [token for token in dict.fromkeys(ids) if 0 <= token < vocab_size]

        def tensor(ids: Iterable[int]) -> Tensor | None:
            kept = known(ids)
            return torch.tensor(kept, dtype=torch.int64) if kept else None

        words: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in sampling.bad_words:
            if len(word) > 1 and known(word[-1:]):
                words.setdefault(word[-2], []).append((word[:-1], word[-1]))
        allowed = sampling.allowed_token_ids
        biases = [(token, bias) for token, bias in sampling.logit_bias if known((token,))]
        stops = (*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids)
        return cls(
            banned=tensor(word[0] for word in sampling.bad_words if len(word) == 1),
            allowed=None if allowed is None else torch.tensor(known(allowed), dtype=torch.int64),
            stops=tensor(stops) if sampling.min_tokens else None,
            min_tokens=sampling.min_tokens,
            words=words,
            bias_ids=torch.tensor([token for token, _ in biases], dtype=torch.int32) if biases else None,
            bias=torch.tensor([bias for _, bias in biases], dtype=torch.float32) if biases else None,
        )

    @property
    def empty(self) -> bool:
        tensors = (self.banned, self.allowed, self.stops, self.bias_ids)
        return not self.words and all(tensor is None for tensor in tensors)

    def forbidden(self, tokens: Sequence[int], num_output_tokens: int) -> list[Tensor]:
        """Ids that must not come next. tokens: prompt and output."""
        found = [] if self.banned is None else [self.banned]
        if self.stops is not None and num_output_tokens < self.min_tokens:
            found.append(self.stops)
        if ends := self.words.get(tokens[-1]):
            last = [end for start, end in ends if tuple(tokens[-len(start) :]) == start]
            found.append(torch.tensor(last, dtype=torch.int64))
        return found


def forbid(logits: Tensor, lists: Sequence[RowIds]) -> None:
    """The listed ids of each row [rows, vocab] get a logit of -inf, in place."""
    if lists:
        logits[_places(lists)] = -torch.inf


def keep_only(logits: Tensor, lists: Sequence[RowIds]) -> None:
    """All but the listed ids of each listed row get a logit of -inf, in place. A row is listed once."""
    if lists:
        places = _places(lists)
        kept = logits[places]
        logits.index_fill_(0, torch.tensor([row for row, _ in lists]), -torch.inf)
        logits[places] = kept


def add_bias(logits: Tensor, rules: Sequence[TokenRules | None], backend: str) -> None:
    """Add to each row [rows, vocab] what its rules say, in place."""
    biases = [(r.bias_ids, r.bias) if r and r.bias_ids is not None and r.bias is not None else None for r in rules]
    given = [bias for bias in biases if bias]
    if given:
        lengths = [len(bias[0]) if bias else 0 for bias in biases]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        ids, values = (torch.cat(parts) for parts in zip(*given, strict=True))
        apply_bias(logits, starts, ids, values, backend=backend)


def _places(lists: Sequence[RowIds]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(ids) for _, ids in lists])
    return torch.tensor([row for row, _ in lists]).repeat_interleave(lengths), torch.cat([ids for _, ids in lists])
