"""The programs of client_examples, as a user runs them: with addresses of either form, and where nothing is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nereid.cli.server_process import HOST, TritonServer
from nereid.processes import free_ports
from tests.gateway.conftest import Gateway
from tests.server.waiting import TIMEOUT_S

EXAMPLES = Path(__file__).resolve().parents[2] / "client_examples"
ONE_ANSWER = ("generate.py", "stream_http.py", "stream_grpc.py")


def run(name: str, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr + done.stdout
    return done


@pytest.mark.parametrize("form", ["{}", "http://{}/"])
@pytest.mark.parametrize("name", ONE_ANSWER)
def test_address_with_or_without_its_scheme(triton: TritonServer, name: str, form: str) -> None:
    port = triton.options.grpc_port if "grpc" in name else triton.options.http_port
    done = run(name, "a b c", f"--url={form.format(f'{HOST}:{port}')}", "--model=tiny", "--max-tokens=3")
    assert done.returncode == 0 and "a b c" in done.stdout, done.stderr


def test_several_answers_to_one_prompt(triton: TritonServer) -> None:
    url = f"--url={HOST}:{triton.options.http_port}"
    done = run("generate.py", "a b c", url, "--model=tiny", "--max-tokens=3", "--n=3", "--temperature=1")
    assert done.returncode == 0 and done.stdout.count("a b c") == 3 and done.stderr.count("ended by") == 3, done


@pytest.mark.parametrize("name", [*ONE_ANSWER, "cancel.py", "openai_client.py", "chat.py"])
def test_no_server_is_said_in_a_line(name: str) -> None:
    [port] = free_ports("127.0.0.1", 1)
    more = [f"--metrics-url={HOST}:{port}"] if name == "cancel.py" else []
    for url in (f"http://{HOST}:{port}", "nonsense:x"):
        done = run(name, f"--url={url}", *more, said="hello\n")
        assert "url" in done.stderr and (done.returncode in (1, 2) or name == "chat.py"), (url, done)


@pytest.mark.parametrize("form", ["http://{}:{}/v1", "{}:{}"])
def test_openais_client(gateway: Gateway, form: str) -> None:
    done = run("openai_client.py", "hello", f"--url={form.format(HOST, gateway.port)}", "--model=says")
    assert done.returncode == 0 and done.stdout.startswith("said\n[11 + 1 tokens]"), done
    unknown = run("openai_client.py", "hello", f"--url={form.format(HOST, gateway.port)}", "--model=no_such")
    assert unknown.returncode == 1
    assert unknown.stderr == "the model 'no_such' does not exist here; /v1/models lists those that do\n"


def test_openais_client_without_its_package() -> None:
    code = "import runpy, sys; sys.modules['openai'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", code, str(EXAMPLES / "openai_client.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == "this example needs the package openai: .venv/bin/pip install openai\n"
