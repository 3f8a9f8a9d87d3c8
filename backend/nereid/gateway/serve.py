"""`nereid gateway`: the application behind an HTTP server, in the foreground until a signal.

Always holds: the port is taken before anything is said; the first stop signal lets running answers end, for up to
`_DRAIN_S`, and then cancels them; a second Ctrl-C cancels them at once.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from dataclasses import dataclass

import uvicorn

from nereid.errors import ConfigError
from nereid.gateway.app import GatewaySettings, make_app
from nereid.gateway.triton import Triton

_DRAIN_S = 20
_BACKLOG = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where to listen, and for what."""

    host: str
    port: int
    settings: GatewaySettings


def serve_gateway(options: GatewayOptions) -> int:
    """Serve until a signal. Returns 0. Raises ConfigError where the address cannot be listened on."""
    with _listen(options.host, options.port) as listening:
        config = uvicorn.Config(
            make_app(options.settings), log_level="warning", lifespan="on", timeout_graceful_shutdown=_DRAIN_S
        )
        server = uvicorn.Server(config)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the server raises again, after its end, what made it end
        asyncio.run(_run(server, listening, options))
    return 0


async def _run(server: uvicorn.Server, listening: socket.socket, options: GatewayOptions) -> None:
    where = f"http://{options.host}:{listening.getsockname()[1]}"
    there = "" if await _is_ready(options.settings.triton) else " (not ready yet: requests get 503 until it is)"
    print(f"READY: OpenAI's API at {where}/v1, Triton at {options.settings.triton}{there}. Ctrl-C ends.", flush=True)
    await server.serve(sockets=[listening])


async def _is_ready(address: str) -> bool:
    triton = Triton(address)
    try:
        return await triton.ready()
    finally:
        await triton.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
        raise ConfigError(f"{host}:{port} {reason}; choose another with --host and --port") from error
