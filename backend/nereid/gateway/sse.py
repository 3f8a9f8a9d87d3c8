"""EventStream: an HTTP response of server-sent events, one JSON object each, and `[DONE]` at the end.

What always holds: the events' source is closed before the response is over, however it ends; a client that leaves ends
it at once, also between two events. An error before the first event is the request's own; a later one is an event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from nereid.gateway.errors import GatewayError
from nereid.gateway.reading import unless_left, wait_left

Events = AsyncGenerator[Mapping[str, object], None]
_END = b"data: [DONE]\n\n"


class EventStream(Response):
    """Made by `start`."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, first: Mapping[str, object], rest: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # of the empty body that Response assumes
        self._request = request
        self._first = first
        self._rest = rest

    @classmethod
    async def start(cls, request: Request, events: Events) -> EventStream:
        """Waits for the first event. Raises GatewayError, or ClientLeftError."""
        try:
            first = await unless_left(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(request, first, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(wait_left(self._request))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            await self._rest.aclose()
        if not writing.cancelled() and (error := writing.exception()) and not isinstance(error, OSError):
            raise error

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send(send, _event(self._first))
        try:
            async for event in self._rest:
                await self._send(send, _event(event))
        except GatewayError as error:
            await self._send(send, _event(error.body))
        else:
            await self._send(send, _END)
        await self._send(send, b"", more=False)

    @staticmethod
    async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(value: Mapping[str, object]) -> bytes:
    # In ASCII: some clients split what they read at every line separator of Unicode.
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"
