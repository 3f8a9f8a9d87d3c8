"""GuideCompiler: guides to matchers, for any thread. Owns the library's view of the tokenizer, the thread that compiles
and the cache of what was compiled.

Bounds for hostile sources: what `limits` lets through (32,768 characters at most); the library's fuel and its largest
grammar; a stack of 512 MiB of address space, which definitions that refer to one another as often as that many
characters allow do not fill (they overflow one of 8 MiB, which would end the process). The slowest source known to us
takes a second. At most _MAX_CACHED guides of together _MAX_CACHED_CHARS characters are kept, refused ones too.
Invariant: whatever compiles can begin: its first mask has been made, and allows more than the end.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from nereid.errors import GuideError, InvalidRequestError
from nereid.guided.limits import MAX_SOURCE_CHARS, SourceError, check_length
from nereid.request import Guide
from nereid.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nereid.guided.library import CompiledGuide, GuideLibrary

_LOG = logging.getLogger(__name__)
_FIELD = "guided_decoding"
_MAX_CACHED = 256
_MAX_CACHED_CHARS = 8 * MAX_SOURCE_CHARS
_STACK_BYTES = 512 << 20
_WAIT_S = 20.0


class GuideCompiler:
    """Compile a guide, or find it compiled. Nothing of the library is loaded before the first guide."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...], wait_s: float = _WAIT_S
    ) -> None:
        """vocab_size: of the model's logits, which may know more or fewer tokens than the tokenizer.  wait_s: longest
        that a caller waits, whatever other guides are compiled before its own."""
        self._wait_s = wait_s
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._cache: OrderedDict[Guide, CompiledGuide | SourceError] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()  # of the cache
        self._worker: ThreadPoolExecutor | None = None
        self._library: GuideLibrary | None = None  # the worker's

    def compile(self, guide: Guide, field: str = _FIELD) -> CompiledGuide:
        """field: where the client wrote it. Raises InvalidRequestError, which names the field and the reason."""
        try:
            found = self._find(guide) or self._wait_for(guide)
        except SourceError as error:
            raise _refusal(field, guide, error) from error
        if isinstance(found, SourceError):
            raise _refusal(field, guide, found)
        return found

    def _wait_for(self, guide: Guide) -> CompiledGuide | SourceError:
        """As the worker finds it. Raises SourceError where it was not asked, or took too long."""
        check_length(guide.source)
        future = self._start().submit(self._compile, guide)
        try:
            return future.result(self._wait_s)
        except futures.TimeoutError as error:
            future.cancel()
            raise SourceError(f"it was not compiled within {self._wait_s} s") from error

    def _find(self, guide: Guide) -> CompiledGuide | SourceError | None:
        with self._lock:
            if guide in self._cache:
                self._cache.move_to_end(guide)
            return self._cache.get(guide)

    def _start(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="nereid-guides")
                usual = threading.stack_size(_STACK_BYTES)
                self._worker.submit(int)  # starts the thread, while the size of its stack is set
                threading.stack_size(usual)
            return self._worker

    # The worker's own, from here on.

    def _compile(self, guide: Guide) -> CompiledGuide | SourceError:
        found = self._find(guide)  # another request may have waited with the same
        if found is None:
            try:
                found = self._loaded().compile(guide)
            except (SourceError, GuideError) as error:
                found = SourceError(str(error))
            except BaseException as error:  # a panic of the library is no Exception
                _LOG.exception("compiling a guide failed")
                found = SourceError(f"the library failed: {type(error).__name__}")
            self._keep(guide, found)
        return found

    def _loaded(self) -> GuideLibrary:
        if self._library is None:
            from nereid.guided.library import GuideLibrary

            self._library = GuideLibrary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._library

    def _keep(self, guide: Guide, found: CompiledGuide | SourceError) -> None:
        with self._lock:
            self._cache[guide] = found
            self._cached_chars += len(guide.source)
            while len(self._cache) > _MAX_CACHED or self._cached_chars > _MAX_CACHED_CHARS:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_chars -= len(oldest.source)


def _refusal(field: str, guide: Guide, reason: SourceError) -> InvalidRequestError:
    kind = guide.kind.value.replace("_", " ")
    return InvalidRequestError.of_field(field, guide.source, f"a {kind} that can be followed ({reason})")
