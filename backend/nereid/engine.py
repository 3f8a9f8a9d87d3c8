"""Engine: one loop thread that takes messages, runs steps and gives out what requests gained.

The loop thread owns the core and with it all state of the engine; other threads speak to it by `submit`, `cancel` and
`drain` alone, and hear from it by the `emit` callable, which gets tuples of RequestOutput. Messages and outputs are
plain data.

Invariant: every submitted request gets exactly one final output, on every path; where the loop dies, all requests
get theirs at once, and later ones in `submit`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

from nereid.batch import Capacity, EngineStats
from nereid.config import EngineConfig
from nereid.engine_core import EngineCore
from nereid.errors import EngineDeadError, EngineError, EngineStoppedError
from nereid.executor import Executor
from nereid.guided.compiler import GuideCompiler
from nereid.model_config import ModelConfig
from nereid.request import Cancel, Drain, EngineMessage, Request, RequestOutput, Submit
from nereid.request_tracker import failed
from nereid.statistics import EngineReport
from nereid.tokenization.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.5
_STORE_S = 5.0  # for what is cached to be written to disk at the end

Emit = Callable[[tuple[RequestOutput, ...]], None]


class Engine:
    """Submit requests, get outputs. `start` loads the model and begins the loop; `shutdown` ends both."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        executor: Executor,
        compiler: GuideCompiler,
        emit: Emit,
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._executor = executor
        self._compiler = compiler
        self._emit = emit
        self._inbox: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()
        self._failure: EngineError | None = None  # set: nothing is taken any more, and why
        self._gate = threading.Lock()  # makes "failed?" and "put" one act, so that no message is left behind
        self._drain_deadline: float | None = None
        self._thread = threading.Thread(target=self._loop, name="nereid-loop", daemon=True)

    def start(self) -> Capacity:
        """Load the model and start the loop. Raises ConfigError or ModelLoadError."""
        capacity = self._executor.start()
        self._core = EngineCore(self._config, capacity, self._model, self._tokenizer, self._executor, self._compiler)
        self._thread.start()
        return capacity

    # Called by any thread.

    def submit(self, request: Request) -> None:
        """Take a request; what becomes of it, a refusal too, comes by `emit`."""
        if failure := self._put(Submit(request)):
            self._emit((failed(request.request_id, failure),))

    def cancel(self, request_id: int) -> None:
        """End a request with a CANCELLED failure; nothing happens where it has ended."""
        self._put(Cancel(request_id))

    def drain(self, timeout_s: float) -> None:
        """Take no more requests; what runs may finish within `timeout_s` seconds, then ends with a failure."""
        self._put(Drain(time.monotonic() + timeout_s))

    def shutdown(self, timeout_s: float) -> None:
        """Drain, wait for the loop to end, free the model. Safe to call twice."""
        self.drain(timeout_s)
        if self._thread.ident is None:
            self._executor.shutdown()
        else:
            self._thread.join(timeout_s + self._config.step_timeout_s)

    @property
    def alive(self) -> bool:
        """Whether requests are taken and steps can run."""
        return self._failure is None and self._thread.is_alive() and self._executor.healthy()

    @property
    def stats(self) -> EngineStats:
        """Counts as of now, for any thread."""
        return self._core.stats

    def take_report(self) -> EngineReport:
        """What was done since the last call, for any thread."""
        return self._core.statistics.take()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request's prompt and output together."""
        return self._core.max_model_len

    def _put(self, message: EngineMessage) -> EngineError | None:
        with self._gate:
            if self._failure is None:
                self._inbox.put(message)
            return self._failure

    # The loop thread's own, from here on.

    def _loop(self) -> None:
        failure: EngineError = EngineDeadError("the engine's loop thread died")
        was_idle = True
        try:
            while not self._drained():
                idle = not self._core.has_work
                if idle and not was_idle:
                    self._core.check_integrity()
                self._receive(block=idle)
                self._give_out(self._core.expire(time.monotonic()))
                self._give_out(self._core.step())
                was_idle = idle
            self._core.store_cached(time.monotonic() + _STORE_S)
            failure = EngineStoppedError()
        except BaseException as error:  # whatever it is, requests must hear of it
            _LOG.exception("the engine's loop thread died")
            failure = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
        finally:
            self._fail_all(failure)
            self._executor.shutdown()
            _LOG.info("the engine has ended; the model's memory is freed")

    def _give_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Emit all that `outputs` yields, also where it stops with an error: those requests are forgotten already."""
        made: list[RequestOutput] = []
        try:
            for output in outputs:
                made.append(output)
        finally:
            if made:
                self._emit(tuple(made))

    def _receive(self, *, block: bool) -> None:
        """Handle all messages that are there; wait for one where there is nothing else to do."""
        try:
            message = self._inbox.get(timeout=_IDLE_WAIT_S) if block else self._inbox.get_nowait()
            while True:
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case Submit(request):
                self._accept(request)
            case Cancel(request_id):
                self._give_out(self._core.cancel(request_id))
            case Drain(deadline):
                self._drain_deadline = min(deadline, self._drain_deadline or deadline)

    def _accept(self, request: Request) -> None:
        if self._drain_deadline is not None:
            self._emit((failed(request.request_id, EngineStoppedError()),))
        else:
            self._give_out(self._core.accept(request))

    def _drained(self) -> bool:
        if self._drain_deadline is None:
            return False
        return not self._core.request_ids or time.monotonic() >= self._drain_deadline

    def _fail_all(self, failure: EngineError) -> None:
        """The loop's last act: close the inbox, and fail what runs, what waits and what has just come in."""
        with self._gate:
            self._failure = failure
        outputs = list(self._core.failures(failure))
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, Submit):
                outputs.append(failed(message.request.request_id, failure))
        self._emit(tuple(outputs))
        self._core.clear()
