"""GuideLibrary: the one place that makes the library's objects. Imports llguidance, so that it is itself imported late.

Invariant: a CompiledGuide's own matcher is never advanced; requests get forks of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from nereid.guided.limits import SourceError
from nereid.guided.masks import num_words
from nereid.guided.matcher import GuideMatcher, Words, reason_of
from nereid.guided.sources import own_words, to_grammar
from nereid.request import Guide

_SILENT = 0
# Less than the library's own by factors of 4 and 5: they bound how long one guide's mask keeps a step waiting.
_LIMITS = LLParserLimits(step_lexer_fuel=50_000, max_grammar_size=100_000, verbose_errors=False)


@dataclass(frozen=True, slots=True)
class CompiledGuide:
    """A guide, ready for any number of requests, from any thread."""

    guide: Guide
    start: GuideMatcher

    def matcher(self) -> GuideMatcher:
        """A matcher at the beginning, for one request."""
        return self.start.fork()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokenizer: as its file has it.  num_tokens: of the tokenizer.  vocab_size: of the model's logits."""

    tokenizer: str
    num_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GuideLibrary:
    """The library with one model's tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises SourceError where the library cannot use the tokenizer."""
        # The library wants a place for each token of the tokenizer; what lies past the model's is cut off each mask.
        self._vocab_size = vocabulary.vocab_size
        self._num_tokens = max(vocabulary.vocab_size, vocabulary.num_tokens)
        try:
            self._tokenizer = LLTokenizer(vocabulary.tokenizer, self._num_tokens, list(vocabulary.eos_token_ids))
        except ValueError as error:
            raise SourceError(f"this model's tokenizer cannot be guided: {reason_of(str(error))}") from error

    def compile(self, guide: Guide) -> CompiledGuide:
        """Raises SourceError or GuideError."""
        try:
            grammar = to_grammar(guide)
        except ValueError as error:  # no Unicode, or no JSON to the library
            raise SourceError(reason_of(str(error))) from error
        library = LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=_LIMITS)
        if library.is_error():
            raise SourceError(reason_of(own_words(guide, library.get_error())))
        start = GuideMatcher(library, num_words(self._num_tokens))
        row = np.zeros(num_words(self._vocab_size), np.int32)
        start.fill(row)  # also warms what all forks begin with
        if start.can_end and self._only_ends(row):
            raise SourceError("it describes the empty text alone")
        return CompiledGuide(guide, start)

    def _only_ends(self, row: Words) -> bool:
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return set(allowed.tolist()) <= set(self._tokenizer.eos_tokens)
