"""Waiting, and doing many things at once; always with an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

TIMEOUT_S = 60.0

Item = TypeVar("Item")
Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Return once `condition` holds; fail with `what` where it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def at_once(task: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """The results of `task`, in order of `items`, `threads` at a time."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(task, items))
