"""The executor seam: where plans go in and drawn tokens come out. Behind it live model, KV tensors and sampling.

Only ints, texts and tuples cross the seam, in frozen dataclasses that can be pickled, so that an executor may live on
other devices or in other processes. An executor never allocates a block. Any failure behind the seam fails the whole
executor, with an ExecutorError from the step's future.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from nereid.batch import Capacity, SchedulerOutput, StepResult
from nereid.errors import ExecutorError

_LOG = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What a LocalExecutor drives: one model on one device."""

    @property
    def capacity(self) -> Capacity: ...

    def run(self, plan: SchedulerOutput) -> StepResult: ...


class Executor(Protocol):
    """One device or many; the scheduler never knows how many."""

    def start(self) -> Capacity:
        """Load the model. Raises ConfigError or ModelLoadError."""
        ...

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        """Queue a step, first in first out; never blocks. The future fails with ExecutorError."""
        ...

    def healthy(self) -> bool:
        """Whether steps can still be run; reads a field."""
        ...

    def shutdown(self) -> None:
        """Free the model and the KV cache, after the step that runs."""
        ...


class LocalExecutor:
    """An executor on this process's device, with a thread of its own (torch keeps its CPU worker threads by caller)."""

    def __init__(self, load: Callable[[], StepRunner]) -> None:
        """load: makes the runner; called once, by `start`, in the executor's thread."""
        self._load = load
        self._runner: StepRunner | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nereid-executor")
        self._failed = False

    def start(self) -> Capacity:
        self._runner = self._thread.submit(self._load).result()
        return self._runner.capacity

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        return self._thread.submit(self._run, plan)

    def healthy(self) -> bool:
        return self._runner is not None and not self._failed

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._runner = None

    def _run(self, plan: SchedulerOutput) -> StepResult:
        if self._runner is None or self._failed:
            raise ExecutorError("the executor has failed or was not started")
        try:
            return self._runner.run(plan)
        except Exception as error:
            self._failed = True
            _LOG.exception("step %d failed", plan.step)
            raise ExecutorError(f"step {plan.step} failed: {type(error).__name__}: {error}") from error
