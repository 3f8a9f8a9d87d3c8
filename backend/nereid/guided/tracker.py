"""GuideTracker: the matchers of the requests that are on their way, by request id. Used by the loop thread alone.

Invariant: a request has a matcher from `add` to `drop`, if it has a guide; the matcher has accepted exactly the tokens
that the request has been given, whatever the scheduler recomputes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nereid.errors import GuideError
from nereid.guided.compiler import GuideCompiler
from nereid.request import Guide

if TYPE_CHECKING:
    from nereid.guided.matcher import GuideMatcher


class GuideTracker:
    """Where each guided request stands."""

    def __init__(self, compiler: GuideCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._matchers: dict[int, GuideMatcher] = {}
        self._errors: dict[int, GuideError] = {}

    def add(self, request_id: int, guide: Guide | None) -> None:
        """Follow a request. Raises QueueTimeoutError where its guide has not been compiled before: that takes too long
        to be done here."""
        if guide is not None:
            self._matchers[request_id] = self._compiler.take(guide).matcher()

    def fork(self, request_id: int, child_id: int) -> None:
        """Follow another sequence of a request, which stands where the first does."""
        if matcher := self._matchers.get(request_id):
            self._matchers[child_id] = matcher.fork()

    def masks(self, request_ids: Iterable[int]) -> tuple[tuple[int, ...], bytes]:
        """Of these requests those that are guided, and what each may be given next: words as in batch.GuideMasks.

        One that cannot go on is remembered; `advance` tells of it.
        """
        guided = tuple(request_id for request_id in request_ids if request_id in self._matchers)
        if not guided:
            return (), b""
        from nereid.guided.masks import fill_masks

        words, errors = fill_masks([self._matchers[request_id] for request_id in guided], self._vocab_size)
        self._errors.update((guided[index], error) for index, error in errors.items())
        return guided, words.tobytes()

    def advance(self, request_id: int, token_id: int) -> bool:
        """A token was drawn for the request; True where its output is complete. Raises GuideError."""
        if (matcher := self._matchers.get(request_id)) is None:
            return False
        if error := self._errors.get(request_id):
            raise error
        if not matcher.accept((token_id,)):
            raise GuideError(f"token {token_id} does not belong to it")
        return matcher.is_complete

    def drop(self, request_id: int) -> None:
        """Forget a request."""
        self._matchers.pop(request_id, None)
        self._errors.pop(request_id, None)
