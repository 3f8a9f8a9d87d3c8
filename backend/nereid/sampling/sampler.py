"""Sampler: one token a row from a batch of logits, each row by its own parameters. Pure functions, no state.

Owns what a request may ask of a draw: its parameters as columns, and tokens that it bans. The draw itself, and how it
truncates, is `nereid_kernels.sample`. Invariant: a row's token depends on its own logits, parameters and key alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nereid_kernels.sample import sample as sample_rows


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Parameters of one row. key: of its noise.  banned: token ids that must not be drawn (stops before min_tokens)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int
    banned: tuple[int, ...] = ()


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], backend: str = "auto") -> tuple[list[int], list[bool]]:
    """Token ids, and whether each row's logits were sound (no NaN, no infinity at the top).

    logits: [rows, vocabulary] float32; changed in place where a row bans tokens.  backend: of
    `nereid_kernels.backends`; all draw the same tokens.
    """
    for index, row in enumerate(rows):
        if row.banned:
            logits[index, list(row.banned)] = -torch.inf

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    tokens, sound = sample_rows(
        logits,
        column([row.temperature for row in rows], torch.float32),
        column([row.min_p for row in rows], torch.float64),
        column([min(row.top_k, logits.shape[1]) for row in rows], torch.int32),
        column([row.top_p for row in rows], torch.float64),
        column([row.key for row in rows], torch.int64),
        backend=backend,
    )
    return tokens.tolist(), sound.tolist()
