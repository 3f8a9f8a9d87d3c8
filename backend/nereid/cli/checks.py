"""`nereid test` and `nereid check`: pytest, ruff and mypy, run from the project's folder with its own settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nereid.errors import ConfigError

_CHECKED = ("backend", "kernels", "tests", "client_examples")


def project_root() -> Path:
    """The checkout that this package runs from. Raises ConfigError where it was installed without one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file():
        raise ConfigError(f"this needs a checkout of the project; nereid was installed without one in {root}")
    return root


def run_tests(arguments: list[str]) -> int:
    """pytest's exit status. Paths in `arguments` are relative to the project's folder."""
    os.chdir(project_root())
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the server does, see server/model.py
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


def run_checks(arguments: list[str]) -> int:
    """0 where ruff's rules, ruff's format and mypy all pass; every one is run, whatever the others say."""
    if arguments:
        raise ConfigError(f"check takes no arguments; got {' '.join(arguments)}")
    root = project_root()
    folders = [name for name in _CHECKED if (root / name).is_dir()]
    commands = (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    return max([_run_tool(root, command, folders) for command in commands])


def _run_tool(root: Path, command: list[str], folders: list[str]) -> int:
    print(f"nereid check: {' '.join(command)}", flush=True)
    status = subprocess.run([sys.executable, "-m", *command, *folders], cwd=root, check=False).returncode
    return 0 if status == 0 else 1
