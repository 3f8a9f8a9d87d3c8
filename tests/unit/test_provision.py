"""The server from its wheel, and what the launcher makes of the server's words."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nereid.cli.provision import provision_server, python_version
from nereid.cli.repository import choose_models
from nereid.cli.sample import curl_command, sample_prompt
from nereid.cli.serve import check_ports
from nereid.cli.server_log import load_failure
from nereid.errors import ConfigError, PackageError
from nereid.packages import require_space, unpack
from nereid.processes import listens


def ignore(text: str) -> None:
    """A progress that nobody reads."""


def test_server_is_complete_and_has_this_pythons_stub_alone() -> None:
    tree = provision_server(ignore)
    assert os.access(tree / "bin" / "tritonserver", os.X_OK)
    assert os.access(tree / "backends" / "python" / "triton_python_backend_stub", os.X_OK)
    assert not any((tree / "python_backend_stubs" / python_version()).iterdir())
    assert list((tree.parents[1] / "nvidia_pytriton.libs").glob("libtritonserver*"))
    assert not list(tree.parents[1].glob("**/*.whl"))


def test_second_provision_is_nothing_but_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = provision_server(ignore)
    monkeypatch.setattr(subprocess, "Popen", None)  # any download would fail
    assert provision_server(ignore) == tree


def test_server_that_cannot_be_fetched_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(PackageError, match="cannot get nvidia-pytriton"):
        provision_server(ignore)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"logs"}


def test_too_little_disk_is_said_with_both_numbers(tmp_path: Path) -> None:
    free_mib = shutil.disk_usage(tmp_path).free >> 20
    require_space(tmp_path, free_mib // 2)
    with pytest.raises(PackageError, match=rf"no disk space: .* MB left, {free_mib * 2} MB are needed"):
        require_space(tmp_path, free_mib * 2)


def test_unpack_takes_what_is_wanted_and_keeps_its_mode(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("in/program", "out/other"):
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o755 << 16
            archive.writestr(member, "x")
    unpack(wheel, lambda name: name.startswith("in/"), tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["in"]
    assert os.access(tmp_path / "to" / "in" / "program", os.X_OK)


def test_damaged_wheel_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"no archive")
    with pytest.raises(PackageError, match=r"a\.whl: damaged"):
        unpack(tmp_path / "a.whl", lambda name: True, tmp_path)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "E1 1 model_lifecycle.cc:654] \"failed to load 'm' version 1: Internal: ConfigError: model: got 3"
            '\\n\\nAt:\\n  /x/model.py(4): initialize\\n"\nI1 1 server.cc] "more"',
            "model m did not load: ConfigError: model: got 3",
        ),
        (
            "E1129 1 1 x.cc:1] \"Poll failed for model directory 'cfg': failed to read text proto from /x\"",
            "model cfg did not load: failed to read text proto from /x",
        ),
        (
            'E1129 1 1 server.cc:2] "CudaDriverHelper has not been initialized."\n'
            "E1129 1 1 main.cc:2] \"failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use \"",
            "the server did not start: failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use",
        ),
        ("/a/tritonserver: unrecognized option '--x'\nUsage:", "the server did not start: unrecognized option '--x'"),
        ("", "the server did not start: it gave no reason"),
    ],
)
def test_reason_in_the_servers_log(log: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert load_failure(tmp_path / "log") == expected


def test_port_in_use_names_the_port_and_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use; choose another with --grpc-port"):
            check_ports({"grpc": port})
        assert listens(os.getpid(), "127.0.0.1", port)
        assert not listens(os.getppid(), "127.0.0.1", port)
    check_ports({"grpc": port})


def test_port_given_twice() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        check_ports({"http": 54321, "grpc": 54321})


def test_models_to_load(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name / "1").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert choose_models(tmp_path, ()) == ("a", "b")
    assert choose_models(tmp_path, ("b", "b")) == ("b",)
    with pytest.raises(ConfigError, match="--model c: not in .*; there are: a, b"):
        choose_models(tmp_path, ("c",))
    with pytest.raises(ConfigError, match="holds no model"):
        choose_models(tmp_path / "notes", ())


def test_curl_command_survives_the_shell(smollm2_directory: Path) -> None:
    prompt = {"messages": sample_prompt(smollm2_directory)["messages"].replace("France", "it's")}
    command = curl_command(8000, "smollm2", prompt, stream=True).replace("curl", "printf '%s\\n'", 1)
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == shlex.split(curl_command(8000, "smollm2", prompt, stream=True))[1:]


def test_commands_to_try_ask_in_messages_where_the_model_has_a_chat_format(
    smollm2_directory: Path, tmp_path: Path
) -> None:
    [field] = sample_prompt(smollm2_directory)
    assert field == "messages" and "<|im_start|>" not in curl_command(
        1, "x", sample_prompt(smollm2_directory), stream=True
    )
    assert sample_prompt(tmp_path)["text_input"]


def test_command_line_errors_are_one_line() -> None:
    command = [sys.executable, "-m", "nereid.cli", "serve", "--model-repository", "/no/such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "nereid: --model-repository /no/such: no such folder\n"
