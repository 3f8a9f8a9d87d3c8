"""Clients that leave, queues that are full, models and servers that go and come: what the gateway makes of it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from nereid.cli.server_process import HOST, TritonServer
from tests.gateway.conftest import Gateway, running_gateway
from tests.gateway.repository import SAYS, SAYS_CONFIG
from tests.gateway.test_refusals import CHATS, COMPLETIONS, call, error_of
from tests.server.conftest import make_server
from tests.server.http_client import RawConnection
from tests.server.repository import write_model
from tests.server.server_state import load, num_running, num_waiting, unload, wait_until_idle
from tests.server.waiting import TIMEOUT_S, wait_until

LONG = {"model": "tiny", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_its_request(
    gateway: Gateway, triton: TritonServer, client: openai.OpenAI, stream: bool, reset: bool
) -> None:
    """Both prompts of one request; another client's request, on the same connection to the server, goes on."""
    wait_until_idle(triton, "tiny")
    other = client.completions.create(
        prompt="x", stream=True, extra_body={"ignore_eos": True}, model="tiny", max_tokens=4000
    )
    next(other)
    body = json.dumps({**LONG, "prompt": ["a", "b"], "stream": stream}).encode()
    leaving = RawConnection(gateway.port, COMPLETIONS, body)
    wait_until(lambda: num_running(triton, "tiny") == 3, "all three run")
    if stream:
        leaving.read_events(3)
    leaving.leave(reset=reset)
    wait_until(lambda: num_running(triton, "tiny") == 1, "what nobody waits for is cancelled", within_s=3)
    assert next(other).choices[0].finish_reason is None
    other.close()
    wait_until_idle(triton, "tiny", within_s=3)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_all_its_choices(gateway: Gateway, triton: TritonServer, stream: bool) -> None:
    wait_until_idle(triton, "tiny")
    body = json.dumps({**LONG, "prompt": ["a", "b"], "n": 3, "stream": stream}).encode()
    leaving = RawConnection(gateway.port, COMPLETIONS, body)
    wait_until(lambda: num_running(triton, "tiny") == 6, "all six run")
    if stream:
        leaving.read_events(8)
    leaving.leave(reset=False)
    wait_until_idle(triton, "tiny", within_s=3)


def test_client_that_leaves_before_the_first_event(gateway: Gateway, triton: TritonServer) -> None:
    wait_until_idle(triton, "tiny")
    with ExitStack() as stack:
        fillers = [RawConnection(gateway.port, COMPLETIONS, json.dumps({**LONG, "prompt": ["x"] * 16}).encode())]
        stack.callback(fillers[0].leave, reset=False)
        wait_until(lambda: num_running(triton, "tiny") == 16, "no more can run")
        waiting = RawConnection(gateway.port, COMPLETIONS, json.dumps({**LONG, "prompt": "y", "stream": True}).encode())
        wait_until(lambda: num_waiting(triton, "tiny") == 1, "one waits")
        waiting.leave(reset=False)
        wait_until(lambda: num_waiting(triton, "tiny") == 0, "it waits no more", within_s=3)
        assert num_running(triton, "tiny") == 16
    wait_until_idle(triton, "tiny", within_s=3)


def test_client_that_leaves_within_its_body(gateway: Gateway, client: openai.OpenAI) -> None:
    """It is no fault, which the fixture would find in what the gateway says."""
    for reset in (False, True):
        with socket.create_connection((HOST, gateway.port), timeout=TIMEOUT_S) as leaving:
            leaving.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            if reset:
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert client.models.list().data


def test_full_queue_is_503_with_a_time_to_come_again(gateway: Gateway, triton: TritonServer) -> None:
    """16 run and 8 wait, which is the limit. A request of several prompts that does not fit is refused as a whole."""
    wait_until_idle(triton, "tiny")
    full = RawConnection(gateway.port, COMPLETIONS, json.dumps({**LONG, "prompt": ["x"] * 24}).encode())
    wait_until(lambda: num_waiting(triton, "tiny") == 8, "the queue is full")
    with gateway.client() as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="queue is full") as refused:
                client.completions.create(prompt=["y", "z"], stream=stream, model="tiny", max_tokens=5)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "1"
    full.leave(reset=False)
    wait_until_idle(triton, "tiny", within_s=3)


def test_async_client_that_breaks_off(gateway: Gateway, triton: TritonServer) -> None:
    wait_until_idle(triton, "tiny")

    async def leave_early() -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
            stream = await client.completions.create(
                prompt="x", stream=True, model="tiny", max_tokens=4000, extra_body={"ignore_eos": True}
            )
            async for _event in stream:
                break
            await stream.close()
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(prompt="x", timeout=0.5, model="tiny", max_tokens=4000)

    asyncio.run(leave_early())
    wait_until_idle(triton, "tiny", within_s=3)


def test_gateway_does_not_keep_a_model_loaded(gateway: Gateway, triton: TritonServer, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="says", messages=[{"role": "user", "content": "x"}]).choices
    assert unload(triton, "says").status == 200
    wait_until(lambda: "says" not in triton.stub_models(), "it is unloaded", within_s=5)
    try:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert (
            error_of(call(gateway, CHATS, {"model": "says", "messages": [{"role": "user"}]}), 404)["param"] == "model"
        )
    finally:
        assert load(triton, "says").status == 200
    assert client.chat.completions.create(model="says", messages=[{"role": "user", "content": "x"}]).choices


def test_server_that_comes_later_and_goes(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "says", None, config=SAYS_CONFIG, source=SAYS)
    server = make_server(tmp_path / "models", ("says",))
    with running_gateway(server.options.grpc_port) as gateway, ExitStack() as stack:
        assert b"not ready yet" in gateway.said
        body = {
            "model": "says",
            "messages": [{"role": "user", "content": json.dumps({"say": ["a", "b"], "wait": True})}],
        }
        for path, method in ((CHATS, "POST"), ("/v1/models", "GET"), ("/health", "GET")):
            assert error_of(call(gateway, path, body, method), 503)["code"] == "unavailable"
        stack.enter_context(server).wait_ready(60)
        wait_until(lambda: call(gateway, "/health", method="GET").status == 200, "the gateway has found it", within_s=5)
        with gateway.client() as client:
            stream = client.chat.completions.create(**body, stream=True)  # type: ignore[call-overload]
            assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "a"]
            server.kill()
            with pytest.raises(openai.APIError, match="cannot be reached"):
                list(stream)
        assert error_of(call(gateway, CHATS, body), 503)["type"] == "unavailable_error"


def test_port_that_is_taken(gateway: Gateway) -> None:
    command = [sys.executable, "-m", "nereid.cli", "gateway", f"--port={gateway.port}"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr == f"nereid: {HOST}:{gateway.port} is in use; choose another with --host and --port\n"


def test_command_line_does_not_load_the_gateways_libraries() -> None:
    code = "import sys, nereid.cli; assert not {'fastapi', 'uvicorn', 'pydantic', 'grpc', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


def test_gateway_that_is_ended_lets_its_answers_end(triton: TritonServer) -> None:
    with running_gateway(triton.options.grpc_port) as ending, ending.client() as client:
        stream = client.completions.create(prompt="x", stream=True, model="tiny", max_tokens=150, seed=1)
        next(stream)
        ending.process.terminate()
        assert list(stream)[-1].choices[0].finish_reason == "length"
