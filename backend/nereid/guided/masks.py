"""The masks of a step: what the guides of its rows allow, as one block of words.

Filled row by row: sixteen rows take 0.1 ms; the library's own pool of threads was no faster on two cores, and would
compete with the forward pass that runs meanwhile. The library lets other threads run (it gives up the GIL).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nereid.errors import GuideError
from nereid.guided.matcher import GuideMatcher, Words

_ALL_ALLOWED = -1


def fill_masks(matchers: Sequence[GuideMatcher], vocab_size: int) -> tuple[Words, dict[int, GuideError]]:
    """int32 [matchers, ceil(vocab_size / 32)]; and by row index the errors of those that cannot go on.

    A row with an error allows every token: the draw goes on beside the others, and its token is not used.
    """
    words = np.empty((len(matchers), num_words(vocab_size)), np.int32)
    errors: dict[int, GuideError] = {}
    for index, matcher in enumerate(matchers):
        try:
            matcher.fill(words[index])
        except GuideError as error:
            errors[index] = error
            words[index] = _ALL_ALLOWED
    return words, errors


def num_words(vocab_size: int) -> int:
    """Words of one mask."""
    return (vocab_size + 31) // 32
