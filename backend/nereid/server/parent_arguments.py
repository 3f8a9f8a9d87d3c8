"""How the server that started this process was started: what else it does not tell its Python backend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def parent_arguments() -> list[str]:
    """The server's command line; empty where there is no /proc."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text("utf-8", "replace").split("\0")
    except OSError:
        return []


def options_in(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each argument, spelled `--name=value` or `--name value`."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            yield name, value if equals else following
