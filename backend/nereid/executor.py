"""The executor seam: where plans go in and drawn tokens come out. Behind it live model, KV tensors and sampling.

Only ints, texts and tuples cross the seam, in frozen dataclasses that can be pickled, so that an executor may live on
other devices or in other processes. An executor never allocates a block. Any failure behind the seam fails the whole
executor, with an ExecutorError from the step's future.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from nereid.batch import Capacity, GuideMasks, SchedulerOutput, StepResult
from nereid.errors import ExecutorError

_LOG = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What a LocalExecutor drives: one model on one device."""

    @property
    def capacity(self) -> Capacity: ...

    def run(self, plan: SchedulerOutput, masks: Callable[[], GuideMasks]) -> StepResult:
        """masks: waits for those of this step; asked for only where a row that samples has a guide."""
        ...

    def close(self) -> None:
        """Finish what goes on beside the steps, within some seconds."""
        ...


class Executor(Protocol):
    """One device or many; the scheduler never knows how many."""

    def start(self) -> Capacity:
        """Load the model. Raises ConfigError or ModelLoadError."""
        ...

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        """Queue a step, first in first out; never blocks. The future fails with ExecutorError."""
        ...

    def supply_masks(self, masks: GuideMasks) -> None:
        """The masks of a submitted step, where one of its rows that sample has a guide; never blocks.

        They come after the plan, so that they can be made while the model runs.
        """
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
        self._masks: queue.SimpleQueue[GuideMasks | None] = queue.SimpleQueue()
        self._failed = False

    def start(self) -> Capacity:
        self._runner = self._thread.submit(self._load).result()
        return self._runner.capacity

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        return self._thread.submit(self._run, plan)

    def supply_masks(self, masks: GuideMasks) -> None:
        self._masks.put(masks)

    def healthy(self) -> bool:
        return self._runner is not None and not self._failed

    def shutdown(self) -> None:
        self._masks.put(None)  # a step that waits for masks ends
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _run(self, plan: SchedulerOutput) -> StepResult:
        if self._runner is None or self._failed:
            raise ExecutorError("the executor has failed or was not started")
        try:
            return self._runner.run(plan, partial(self._masks_of, plan.step))
        except Exception as error:
            self._failed = True
            _LOG.exception("step %d failed", plan.step)
            raise ExecutorError(f"step {plan.step} failed: {type(error).__name__}: {error}") from error

    def _masks_of(self, step: int) -> GuideMasks:
        masks = self._masks.get()
        if masks is None or masks.step != step:
            raise ExecutorError(f"got the masks of step {masks.step if masks else None}")
        return masks
