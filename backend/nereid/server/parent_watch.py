"""ParentWatch: ends this process when the server that started it is gone.

A server that is killed, or that reaches its exit timeout while a model is still held, leaves its Python processes
behind: they would wait for ever for its next message, with a model's memory in their hands.
"""

from __future__ import annotations

import logging
import os

_LOG = logging.getLogger(__name__)
_LEFT_ALONE = 1  # exit status


class ParentWatch:
    """Compares, at each `check`, the parent with the one that this process had when the watch was made."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    def check(self) -> None:
        """Return where the server lives; else end the process at once: nobody is left to answer to."""
        if os.getppid() != self._parent:
            _LOG.error("the server (process %d) is gone: ending", self._parent)
            os._exit(_LEFT_ALONE)
