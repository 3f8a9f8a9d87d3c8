"""`nereid gateway`: the application behind an HTTP server, in the foreground until a signal.

Always holds: the port is taken before anything is said; the first stop signal lets running answers end, for up to
`_DRAIN_S`, and then cancels them; a second Ctrl-C cancels them at once.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
import sys
from dataclasses import dataclass

import uvicorn

from nereid.errors import ConfigError
from nereid.gateway.app import GatewaySettings, make_app
from nereid.gateway.triton import Triton

_DRAIN_S = 20
_BACKLOG = 2048
_OPEN = "the gateway has no key and listens on {}: every machine that reaches it is let in"


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
            # For a signal before the server has taken them over; after its end it raises again what made it end.
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        asyncio.run(_run(server, listening, options))
    return 0


async def _run(server: uvicorn.Server, listening: socket.socket, options: GatewayOptions) -> None:
    keys, address = options.settings.keys, listening.getsockname()[0]
    if not keys and not ipaddress.ip_address(address).is_loopback:
        print(f"nereid: warning: {_OPEN.format(address)}; --api-key KEY closes it", file=sys.stderr, flush=True)
    print(await _ready_line(options, listening.getsockname()[1]), flush=True)
    await server.serve(sockets=[listening])


async def _ready_line(options: GatewayOptions, port: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    triton, keys = options.settings.triton, options.settings.keys
    there = "" if await _is_ready(triton) else " (not ready yet: requests get 503 until it is)"
    access = f"keys: {len(keys)}" if keys else "open to everybody who reaches it"
    return f"READY: OpenAI's API at http://{host}:{port}/v1 ({access}), Triton at {triton}{there}. Ctrl-C ends."


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
