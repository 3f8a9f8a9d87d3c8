"""GuideCompiler: guides to matchers, for any thread. Owns the library's view of the tokenizer, the thread that compiles
and the cache of what was compiled.

Bounds for hostile sources: what `limits` lets through (32,768 characters at most); the library's fuel and its largest
grammar; a stack of 512 MiB of address space, which definitions that refer to one another as often as that many
characters allow do not fill (they overflow one of 8 MiB, which would end the process). None of these is sure: so a
guide is compiled here only once another process has compiled it within bounds of time and memory (`check_process`);
what was too slow there is refused for a minute. The slowest source known to us takes a second. At most _MAX_CACHED
guides of together _MAX_CACHED_CHARS characters are kept, refused ones too.
Invariant: whatever compiles can begin: its first mask has been made, and allows more than the end.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from nereid.errors import GuideError, InvalidRequestError, QueueTimeoutError, RequestError
from nereid.guided.check_process import DEADLINE_S, MEMORY_BYTES, STACK_BYTES, GuideChecker
from nereid.guided.handover import Handover
from nereid.guided.limits import MAX_SOURCE_CHARS, SourceError, check_length
from nereid.request import Guide
from nereid.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nereid.guided.library import CompiledGuide, GuideLibrary

_LOG = logging.getLogger(__name__)
_FIELD = "guided_decoding"
_MAX_CACHED = 256
_MAX_CACHED_CHARS = 8 * MAX_SOURCE_CHARS
_WAIT_S = 20.0
_RETRY_S = 60.0  # the machine may have been to blame for a guide that was slow
_RUN_S = 120.0  # more than the start of a process, a check and what was checked can take


class GuideCompiler:
    """Compile a guide, or find it compiled. Nothing of the library is loaded before the first guide."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        wait_s: float = _WAIT_S,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """vocab_size: of the model's logits, which may know more or fewer tokens than the tokenizer.  wait_s: longest
        that a caller waits while other guides are compiled.  deadline_s, memory_bytes: for one guide to compile."""
        self._wait_s = wait_s
        self._bounds = (deadline_s, memory_bytes)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._cache: OrderedDict[Guide, CompiledGuide | SourceError] = OrderedDict()
        self._cached_chars = 0
        self._retry_times: dict[Guide, float] = {}  # of guides in the cache
        self._lock = threading.Lock()  # of the cache
        self._handover = Handover()
        self._worker: ThreadPoolExecutor | None = None
        self._loaded: tuple[GuideLibrary, GuideChecker] | None = None  # the worker's

    def compile(self, guide: Guide, field: str = _FIELD) -> CompiledGuide:
        """The guide ready for one request, for which it is kept until it is taken. field: where the client wrote it.

        Raises InvalidRequestError, which names the field and the reason; QueueTimeoutError where other guides took
        all the time; RequestError where guides cannot be checked at present."""
        found = self._find(guide)
        if found is None:
            try:
                check_length(guide.source)
            except SourceError as error:
                raise _refusal(field, guide, error) from error
            found = self._result_of(self._start().submit(self._compile, guide))
        if isinstance(found, SourceError):
            raise _refusal(field, guide, found)
        self._handover.give(found)
        return found

    def take(self, guide: Guide) -> CompiledGuide:
        """What `compile` made ready for one request; at once, whatever is being compiled.

        Raises QueueTimeoutError where it has not been asked for, or too long ago.
        """
        found = self._handover.take(guide) or self._find(guide)
        if found is None or isinstance(found, SourceError):
            raise QueueTimeoutError("the request's guide was made ready too long ago, and is not kept any more")
        return found

    def _result_of(self, future: Future[CompiledGuide | SourceError]) -> CompiledGuide | SourceError:
        try:
            return future.result(self._wait_s)
        except futures.TimeoutError as error:
            if future.cancel():  # it has not begun: the guides before it are to blame
                raise QueueTimeoutError(f"other guides were compiled for {self._wait_s:g} s; try again") from error
        try:
            return future.result(_RUN_S)
        except futures.TimeoutError as error:
            raise RequestError(f"the guide was not compiled within {_RUN_S:g} s") from error

    def _find(self, guide: Guide) -> CompiledGuide | SourceError | None:
        with self._lock:
            if guide not in self._cache:
                return None
            self._cache.move_to_end(guide)
            is_due = time.monotonic() > self._retry_times[guide]
            return None if is_due else self._cache[guide]

    def _start(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="nereid-guides")
                usual = threading.stack_size(STACK_BYTES)
                self._worker.submit(int)  # starts the thread, while the size of its stack is set
                threading.stack_size(usual)
            return self._worker

    # The worker's own, from here on.

    def _compile(self, guide: Guide) -> CompiledGuide | SourceError:
        found = self._find(guide)  # another request may have waited with the same
        if found is None:
            retry_time = math.inf
            try:
                found = self._checked(guide)
            except (SourceError, GuideError) as error:
                found = SourceError(str(error))
            except TimeoutError as error:
                found = SourceError(str(error))
                retry_time = time.monotonic() + _RETRY_S
            except RequestError:  # says nothing of the guide
                raise
            except BaseException as error:  # a panic of the library is no Exception
                _LOG.exception("compiling a guide failed")
                found = SourceError(f"the library failed: {type(error).__name__}")
            self._keep(guide, found, retry_time)
        return found

    def _checked(self, guide: Guide) -> CompiledGuide:
        library, checker = self._load()
        if reason := checker.refusal(guide):
            raise SourceError(reason)
        return library.compile(guide)

    def _load(self) -> tuple[GuideLibrary, GuideChecker]:
        if self._loaded is None:
            from nereid.guided.library import GuideLibrary, Vocabulary

            tokenizer = self._tokenizer
            vocabulary = Vocabulary(tokenizer.as_json(), tokenizer.num_tokens, self._vocab_size, self._eos_token_ids)
            self._loaded = GuideLibrary(vocabulary), GuideChecker(vocabulary, *self._bounds)
        return self._loaded

    def _keep(self, guide: Guide, found: CompiledGuide | SourceError, retry_time: float) -> None:
        with self._lock:
            if guide not in self._cache:
                self._cached_chars += len(guide.source)
            self._cache[guide] = found
            self._retry_times[guide] = retry_time
            while len(self._cache) > _MAX_CACHED or self._cached_chars > _MAX_CACHED_CHARS:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_chars -= len(oldest.source)
                del self._retry_times[oldest]


def _refusal(field: str, guide: Guide, reason: SourceError) -> InvalidRequestError:
    kind = guide.kind.value.replace("_", " ")
    return InvalidRequestError.of_field(field, guide.source, f"a {kind} that can be followed ({reason})")
