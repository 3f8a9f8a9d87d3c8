"""Engine: one loop thread that takes messages, runs steps and gives out what requests gained.

The loop thread owns all state of the engine; other threads speak to it by `submit`, `cancel` and `drain` alone, and
hear from it by the `emit` callable, which gets tuples of RequestOutput. Messages and outputs are plain data.

Invariant: every submitted request gets exactly one finished output, on every path; where the loop dies, all requests
get theirs at once, and later ones in `submit`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from nereid.batch import Capacity, EngineStats, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.errors import (
    EngineDeadError,
    EngineError,
    EngineStoppedError,
    ExecutorError,
    NereidError,
    NumericsError,
    QueueTimeoutError,
    RequestCancelledError,
)
from nereid.executor import Executor
from nereid.kv_cache.manager import KVCacheManager
from nereid.model_config import ModelConfig
from nereid.output_processor import OutputProcessor
from nereid.request import (
    Cancel,
    Drain,
    EngineMessage,
    FinishReason,
    Request,
    RequestFailure,
    RequestOutput,
    RequestStatus,
    Submit,
)
from nereid.scheduler import Advance, RequestState, Scheduler
from nereid.tokenization.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.5

Emit = Callable[[tuple[RequestOutput, ...]], None]


class Engine:
    """Submit requests, get outputs. `start` loads the model and begins the loop; `shutdown` ends both."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer, executor: Executor, emit: Emit
    ) -> None:
        self._config = config
        self._model = model
        self._executor = executor
        self._emit = emit
        self._outputs = OutputProcessor(tokenizer)
        self._inbox: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()
        self._states: dict[int, RequestState] = {}
        self._failure: EngineError | None = None  # set: nothing is taken any more, and why
        self._gate = threading.Lock()  # makes "failed?" and "put" one act, so that no message is left behind
        self._drain_deadline: float | None = None
        self._thread = threading.Thread(target=self._loop, name="nereid-loop", daemon=True)

    def start(self) -> Capacity:
        """Load the model and start the loop. Raises ConfigError or ModelLoadError."""
        capacity = self._executor.start()
        self._kv_cache = KVCacheManager(capacity.num_blocks, capacity.group_block_sizes)
        wanted = self._config.max_model_len or self._model.max_position_embeddings
        self.max_model_len = min(wanted, self._model.max_position_embeddings, self._kv_cache.max_tokens)
        self._scheduler = Scheduler(self._config, self._kv_cache, self.max_model_len, self._model.eos_token_ids)
        self._thread.start()
        return capacity

    # Called by any thread.

    def submit(self, request: Request) -> None:
        """Take a request; what becomes of it, a refusal too, comes by `emit`."""
        if failure := self._put(Submit(request)):
            self._emit((RequestOutput(request.request_id, failure=_as_data(failure)),))

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
        """Counts as of now; read without a lock, each right by itself."""
        scheduler = self._scheduler
        return EngineStats(
            scheduler.num_running, scheduler.num_waiting, self._kv_cache.usage, scheduler.num_preemptions
        )

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
                idle = not self._scheduler.has_work
                if idle and not was_idle:
                    self._scheduler.check_integrity()
                self._receive(block=idle)
                self.step()
                was_idle = idle
            failure = EngineStoppedError()
        except BaseException as error:  # whatever it is, requests must hear of it
            _LOG.exception("the engine's loop thread died")
            failure = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
        finally:
            self._fail_all(failure)
            self._executor.shutdown()
            _LOG.info("the engine has ended; the model's memory is freed")

    def step(self) -> None:
        """One step: end what ran out of time, schedule, run, sample, give out."""
        self._give_out(self._expire(time.monotonic()))
        plan = self._scheduler.schedule()
        if plan.scheduled or plan.finished_ids:
            advances = self._scheduler.update(plan, self._run(plan))
            self._give_out(self._advance(advance) for advance in advances)

    def _give_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Emit all that `outputs` yields, also where it stops with an error: those requests are forgotten already."""
        made: list[RequestOutput] = []
        try:
            for output in outputs:
                made.append(output)
        finally:
            if made:
                self._emit(tuple(made))

    def _run(self, plan: SchedulerOutput) -> StepResult:
        timeout_s = self._config.step_timeout_s
        try:
            return self._executor.submit(plan).result(timeout_s)
        except TimeoutError as error:
            raise ExecutorError(f"step {plan.step} took longer than step_timeout_s ({timeout_s})") from error

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
                if state := self._states.get(request_id):
                    self._emit((self._end_failed(state, RequestCancelledError("the request was cancelled")),))
            case Drain(deadline):
                self._drain_deadline = min(deadline, self._drain_deadline or deadline)

    def _accept(self, request: Request) -> None:
        try:
            if self._drain_deadline is not None:
                raise EngineStoppedError()
            self._states[request.request_id] = self._scheduler.add(request)
            self._outputs.add(request)
        except NereidError as error:
            self._emit((RequestOutput(request.request_id, failure=_as_data(error)),))

    def _advance(self, advance: Advance) -> RequestOutput:
        state = advance.state
        if advance.error is not None:
            return self._end_failed(state, NumericsError(advance.error))
        output = self._outputs.advance(state.request_id, advance.token_id, advance.finish_reason)
        if output.finished:
            self._forget(state)
        return output

    def _expire(self, now: float) -> Iterator[RequestOutput]:
        """End the requests whose deadline has passed, and those that waited too long."""
        queue_timeout_s = self._config.queue_timeout_ms / 1e3
        for state in list(self._scheduler.requests()):
            request = state.request
            if request.deadline is not None and now >= request.deadline:
                self._forget(state)
                yield self._outputs.end(request.request_id, FinishReason.TIMEOUT)
            elif state.status is RequestStatus.WAITING and now - request.arrival_time >= queue_timeout_s:
                waited = f"not scheduled within queue_timeout_ms ({self._config.queue_timeout_ms})"
                yield self._end_failed(state, QueueTimeoutError(waited))

    def _end_failed(self, state: RequestState, error: NereidError) -> RequestOutput:
        self._forget(state)
        return self._outputs.fail(state.request_id, _as_data(error))

    def _forget(self, state: RequestState) -> None:
        self._scheduler.finish(state)
        del self._states[state.request_id]

    def _drained(self) -> bool:
        if self._drain_deadline is None:
            return False
        return not self._states or time.monotonic() >= self._drain_deadline

    def _fail_all(self, failure: EngineError) -> None:
        """The loop's last act: close the inbox, and fail what runs, what waits and what has just come in."""
        with self._gate:
            self._failure = failure
        request_ids = list(self._states)
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, Submit):
                request_ids.append(message.request.request_id)
        data = _as_data(failure)
        self._emit(tuple(RequestOutput(request_id, failure=data) for request_id in request_ids))
        for state in list(self._states.values()):
            self._forget(state)


def _as_data(error: NereidError) -> RequestFailure:
    return RequestFailure(error.code, str(error))
