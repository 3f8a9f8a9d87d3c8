"""EncoderPool: encodes prompts off the server's thread where they are long. Owns its threads and counts what waits.

Invariant: no more than `max_waiting` long prompts wait or run; one more is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from nereid.errors import QueueFullError

# Up to so many characters are encoded at once: about a millisecond, less than what a hop to a thread may cost.
_SHORT_CHARS = 4096


class EncoderPool:
    """Runs a request's encoding and submission: here where the prompt is short, in a pool where it is long."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="nereid-encoder")
        self._places = threading.BoundedSemaphore(max_waiting)
        self._max_waiting = max_waiting

    @staticmethod
    def is_long(num_chars: int) -> bool:
        """Whether a prompt of so many characters is encoded in the pool."""
        return num_chars > _SHORT_CHARS

    def run(self, num_chars: int, task: Callable[[], None]) -> None:
        """Call `task`, which raises nothing. Raises QueueFullError where too many long prompts wait."""
        if not self.is_long(num_chars):
            task()
            return
        if not self._places.acquire(blocking=False):
            raise QueueFullError(f"{self._max_waiting} long prompts wait to be encoded already (max_queue_size)")
        self._pool.submit(task).add_done_callback(self._release)

    def _release(self, _: Future[None]) -> None:
        self._places.release()

    def close(self) -> None:
        """Finish what waits, then end the threads; called when no more requests can come."""
        self._pool.shutdown(wait=True)
