"""The body of an HTTP request: its size, its JSON, its key. And noticing that its client has left.

A body is read to at most its limit and parsed by a parser of bounded depth, whatever is in it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from nereid.gateway.errors import GatewayError

MAX_BODY_BYTES = 16 << 20
Result = TypeVar("Result")


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Request) -> object:
    """The body, parsed. Raises GatewayError: 413 where it is over the limit, 400 where it is not JSON; or
    ClientLeftError."""
    try:
        parsed: object = from_json(await _read(request), allow_inf_nan=False)
    except ValueError as error:
        raise GatewayError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    return parsed


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise GatewayError(413, f"the body has over {MAX_BODY_BYTES} bytes", code="body_too_large")
    except ClientDisconnect as error:
        raise ClientLeftError from error
    return bytes(body)


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raises GatewayError (401) where `keys` are set and the request has none of them. No key, or an empty one, is
    none of them, whatever `keys` are."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
    # Each is compared, in a time that tells nothing of it.
    if keys and not (sent and max([hmac.compare_digest(sent, key.encode("utf-8")) for key in keys])):
        raise GatewayError(401, "no valid key; send it as Authorization: Bearer KEY", code="invalid_api_key")


async def wait_left(request: Request) -> None:
    """Return when the client has left; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled, to its end, where the client leaves: then raises ClientLeftError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
