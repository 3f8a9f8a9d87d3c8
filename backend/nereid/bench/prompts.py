"""Prompts of given lengths: token ids of a real text, by the model's own tokenizer.

Always holds: the same workload has the same prompts, token for token, whichever engine gets them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from nereid.bench.workloads import Workload
from nereid.tokenization.tokenizer import Tokenizer


class PromptSource:
    """Cuts prompts out of one text, which goes on from its beginning where it ends."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)

    @classmethod
    def of(cls, text: Path, model: Path) -> PromptSource:
        """text: a file in UTF-8.  model: a Hugging Face directory, for its tokenizer."""
        return cls(Tokenizer(model).encode(text.read_text("utf-8")))

    @classmethod
    def of_project(cls, checkout: Path, model: Path) -> PromptSource:
        """The text that stays as it is, whatever becomes of the project."""
        return cls.of(checkout / "LICENSE", model)

    def prompts(self, workload: Workload) -> list[list[int]]:
        """Token ids of each request of `workload`."""
        rng = random.Random(workload.name)
        return [self._cut(rng.randrange(len(self._token_ids)), a.num_prompt_tokens) for a in workload.arrivals]

    def _cut(self, start: int, length: int) -> list[int]:
        size = len(self._token_ids)
        return [self._token_ids[(start + offset) % size] for offset in range(length)]
