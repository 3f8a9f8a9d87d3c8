"""The launcher script, run for real on a throw-away checkout with a stand-in for Python and pip: the test is of what
the script decides (set up, skip, wait, rebuild, refuse), and needs no registry. And the versions that it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers the launcher's probe, makes an environment whose python is itself, notes each pip call, and says what it is
# told to run. $FAKE names the folder with its orders.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) cat "$FAKE/probe" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >>"$FAKE/calls" ;;
    "-m pip")
        echo "pip $*" | tr -s ' ' >>"$FAKE/calls"
        [ ! -e "$FAKE/slow" ] || sleep 1
        [ ! -e "$FAKE/broken" ] || { cat "$FAKE/broken" >"$4"; exit 1; } ;;
    *) echo "ran $*" ;;
esac
"""


class Checkout:
    """A copy of what the launcher reads, and the orders for the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.fake = folder / "fake"
        self.root.mkdir()
        self.fake.mkdir()
        for name in ("nereid", "pyproject.toml", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.python = self.fake / "python3"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.probe("ok 3.11.9")

    def probe(self, answer: str) -> None:
        (self.fake / "probe").write_text(answer)

    def environment(self, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if name != "NEREID_PYTHON"}
        return {**clean, "FAKE": str(self.fake), "HOME": str(self.fake), "NEREID_PYTHON": str(self.python), **more}

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.root / "nereid"), *arguments]
        return subprocess.run(
            command, env=self.environment(**more), capture_output=True, text=True, check=False, timeout=60
        )

    def calls(self) -> list[str]:
        """What was run since the last question: "venv", "pip ..."."""
        path = self.fake / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_first_start_sets_up_and_second_does_nothing(checkout: Checkout) -> None:
    first = checkout.run("serve", "--http-port", "1")
    assert first.returncode == 0
    assert first.stdout.endswith("ran -m nereid.cli serve --http-port 1\n")
    assert [call.split()[0] for call in checkout.calls()] == ["venv", "pip", "pip"]
    started = time.monotonic()
    second = checkout.run("serve")
    assert second.stdout == "ran -m nereid.cli serve\n"
    assert checkout.calls() == []
    assert time.monotonic() - started < 1.0


def test_tools_are_installed_by_the_first_test_alone(checkout: Checkout) -> None:
    checkout.run("serve")
    assert not any("requirements-dev" in call for call in checkout.calls())
    assert checkout.run("test", "-k", "x").stdout.endswith("ran -m nereid.cli test -k x\n")
    assert any("requirements-dev" in call for call in checkout.calls())
    checkout.run("check")
    checkout.run("serve")
    assert checkout.calls() == []


def test_changed_pins_are_installed_without_a_new_environment(checkout: Checkout) -> None:
    checkout.run("serve")
    checkout.calls()
    with (checkout.root / "requirements.txt").open("a") as file:
        file.write("more==1.0\n")
    checkout.run("serve")
    assert [call.split()[0] for call in checkout.calls()] == ["pip", "pip"]


def test_failed_set_up_is_one_line_and_is_made_anew(checkout: Checkout) -> None:
    (checkout.fake / "broken").write_text("ERROR: No matching distribution found for torch\n")
    failed = checkout.run("serve")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "the package registry cannot be reached" in failed.stderr
    assert Path(failed.stderr.strip().rpartition("the log: ")[2]).is_file()
    (checkout.fake / "broken").unlink()
    checkout.calls()
    assert checkout.run("serve").returncode == 0
    assert checkout.calls()[0] == "venv"


def test_full_disk_is_said(checkout: Checkout) -> None:
    (checkout.fake / "broken").write_text("ERROR: [Errno 28] No space left on device\n")
    assert "no disk space left" in checkout.run("serve").stderr


def test_killed_set_up_is_made_anew(checkout: Checkout) -> None:
    (checkout.fake / "slow").touch()
    command = [str(checkout.root / "nereid"), "serve"]
    child = subprocess.Popen(command, env=checkout.environment(), stdout=subprocess.DEVNULL)
    marker = checkout.root / ".venv" / ".installing"
    deadline = time.monotonic() + 30
    while not (marker.exists() and any("pip" in call for call in checkout.calls())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()
    child.wait()
    (checkout.fake / "slow").unlink()
    assert checkout.run("serve").stdout.endswith("ran -m nereid.cli serve\n")
    assert "venv" in checkout.calls()
    assert not marker.exists()


def test_two_starts_at_once_set_up_once(checkout: Checkout) -> None:
    (checkout.fake / "slow").touch()
    command = [str(checkout.root / "nereid"), "serve"]
    children = [
        subprocess.Popen(command, env=checkout.environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [child.communicate(timeout=60)[0] for child in children]
    assert all(text.endswith("ran -m nereid.cli serve\n") for text in said)
    assert sum("waiting for it" in text for text in said) == 1
    assert checkout.calls().count("venv") == 1


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("is Python 3.13, too new for the server", "Nereid needs Python 3.10, 3.11 or 3.12"),
        ("is Python 3.11 without venv (apt install python3 python3-venv)", "apt install python3 python3-venv"),
    ],
)
def test_wrong_python_is_one_line(checkout: Checkout, answer: str, advice: str) -> None:
    checkout.probe(answer)
    refused = checkout.run("serve")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert f"{checkout.python} {answer}" in refused.stderr
    assert advice in refused.stderr


def test_too_new_default_python_is_passed_over_for_another(checkout: Checkout) -> None:
    newer = checkout.fake / "python3.12"
    newer.write_text(FAKE_PYTHON.replace('"$FAKE/probe"', '"$FAKE/probe-3.12"'))
    newer.chmod(0o755)
    (checkout.fake / "probe-3.12").write_text("ok 3.12.1")
    checkout.probe("is Python 3.13, too new for the server")
    path = f"{checkout.fake}{os.pathsep}/usr/bin{os.pathsep}/bin"
    # Python 3.11 is looked for before 3.12: this machine may have one.
    (checkout.fake / "python3.11").write_text("#!/bin/sh\nexit 1\n")
    (checkout.fake / "python3.11").chmod(0o755)
    started = checkout.run("serve", PATH=path, NEREID_PYTHON="")
    assert "(Python 3.12.1)" in started.stdout


def test_help_needs_no_set_up(checkout: Checkout) -> None:
    assert "./nereid serve" in checkout.run("--help").stdout
    assert checkout.calls() == []


def test_direct_pins_are_the_installed_ones() -> None:
    direct = re.findall(r'^    "([\w-]+)(?:\[.*\])?==([\w.]+)",', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    listed = (ROOT / "requirements.txt").read_text("utf-8") + (ROOT / "requirements-dev.txt").read_text("utf-8")
    pinned = set(listed.lower().splitlines())
    assert len(direct) > 10
    assert [name for name, version in direct if f"{name}=={version}" not in pinned] == []
