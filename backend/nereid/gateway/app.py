"""The gateway's routes: HTTP in, HTTP out. Owns the connection to Triton for as long as the application runs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from nereid.errors import shorten
from nereid.gateway.chat import Chat
from nereid.gateway.completions import Completion
from nereid.gateway.errors import GatewayError, unavailable
from nereid.gateway.reading import ClientLeftError, check_key, read_json, unless_left
from nereid.gateway.schemas import ChatRequest, CompletionRequest, checked
from nereid.gateway.sse import EventStream
from nereid.gateway.tool_format import ToolFormat
from nereid.gateway.triton import Triton

_OWNER = "nereid"
_CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """triton: HOST:PORT of its gRPC endpoint.  keys: those that are let in; none: everybody is."""

    triton: str
    keys: tuple[str, ...] = ()
    tool_format: ToolFormat = ToolFormat.AUTO


def make_app(settings: GatewaySettings) -> FastAPI:
    """The application; it connects when it starts, and starts also where Triton is not there yet."""
    app = FastAPI(title="Nereid", openapi_url=None, lifespan=_connected(settings.triton))
    app.state.settings = settings
    app.state.created = int(time.time())
    app.add_exception_handler(GatewayError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientLeftError, _answer_nobody)
    app.add_exception_handler(Exception, _answer_fault)
    app.get("/health")(_health)
    app.include_router(_routes(settings.keys))
    return app


def _connected(address: str) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.triton = Triton(address)
        try:
            yield
        finally:
            await app.state.triton.close()

    return lifespan


def _routes(keys: Sequence[str]) -> APIRouter:
    def check(request: Request) -> None:
        check_key(request, keys)

    router = APIRouter(prefix="/v1", dependencies=[Depends(check)])
    router.get("/models")(_models)
    router.get("/models/{name}")(_model)
    router.post("/completions")(_completions)
    router.post("/chat/completions")(_chat)
    router.post("/embeddings")(_embeddings)
    return router


def _triton(request: Request) -> Triton:
    triton: Triton = request.app.state.triton
    return triton


async def _health(request: Request) -> Response:
    if not await _triton(request).ready():
        raise unavailable("the Triton server is not ready, or cannot be reached")
    return JSONResponse({"status": "ok"})


async def _models(request: Request) -> Response:
    names = await _triton(request).model_names()
    return JSONResponse({"object": "list", "data": [_model_card(request, name) for name in names]})


async def _model(request: Request, name: str) -> Response:
    return JSONResponse(_model_card(request, (await _triton(request).model(name)).name))


def _model_card(request: Request, name: str) -> dict[str, object]:
    # Triton does not know since when it has a model: the gateway's own start stands for it.
    return {"id": name, "object": "model", "created": request.app.state.created, "owned_by": _OWNER}


async def _completions(request: Request) -> Response:
    body = checked(CompletionRequest, await read_json(request))
    job = Completion(_triton(request), await _triton(request).model(body.model), body)
    return await _answered(request, job, stream=body.stream)


async def _chat(request: Request) -> Response:
    body = checked(ChatRequest, await read_json(request))
    tool_format = request.app.state.settings.tool_format
    job = Chat(_triton(request), await _triton(request).model(body.model), body, tool_format)
    return await _answered(request, job, stream=body.stream)


async def _answered(request: Request, job: Completion | Chat, *, stream: bool) -> Response:
    if stream:
        return await EventStream.start(request, job.events())
    return JSONResponse(await unless_left(request, job.answer()))


async def _embeddings() -> Response:
    raise GatewayError(400, "embeddings are not offered: the models of this server generate text", code="not_offered")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return JSONResponse(error.body, error.status, error.headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shorten(request.url.path)}: {error.detail}"
    own = GatewayError(error.status_code, message, code="not_found")
    return JSONResponse(own.body, own.status, error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


async def _answer_fault(request: Request, error: Exception) -> Response:
    """A fault of ours; it is in the log."""
    return JSONResponse(GatewayError(500, "the gateway failed; its log says why", code="internal").body, 500)
