"""The answers of a worker while the server starts: 200 for /live, 503 with Retry-After for everything else."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from jaxserve.config import ServerConfig
from jaxserve.server.process.tls import ssl_context
from jaxserve.server.protocol.utility import Health
from jaxserve.server.wire.errors import refusal
from jaxserve.server.wire.http import protocol_class

RETRY_AFTER = 5
"""Seconds after which a client may ask again; the duration of a start is unknown."""

_HEADERS = {"connection": "close", "retry-after": str(RETRY_AFTER)}  # the next request is for the server itself


class Early:
    """The application during start-up: no route, no state, no key. Open connections are passed on to the server
    later.
    """

    def __init__(self) -> None:
        self._server: ASGIApp | None = None

    def hand_over(self, server: ASGIApp) -> None:
        """Pass all further requests to `server`."""
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self._server is not None:
            answer = self._server
        elif scope["path"] == "/live":
            answer = _health(200, "ok")
        elif scope["path"] == "/health":
            answer = _health(503, "the server is starting")
        else:
            answer = refusal(503, "the server is starting", headers=_HEADERS)
        await answer(scope, receive, send)


def _health(status: int, text: str) -> Response:
    return Response(msgspec.json.encode(Health(text)), status, _HEADERS, media_type="application/json")


@contextlib.asynccontextmanager
async def answering(listener: socket.socket, config: ServerConfig) -> AsyncGenerator[Early]:
    """Answer requests meanwhile. Connections that have not been accepted by the end are left for the server."""
    app = Early()
    settings = uvicorn.Config(
        app,
        lifespan="off",
        http=protocol_class(config.receive_timeout, config.allowed_origins),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive_timeout,
    )
    settings.load()

    def protocol() -> Any:
        return settings.http_protocol_class(config=settings, server_state=ServerState(), app_state={})  # pyright: ignore

    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, sock=listener.dup(), ssl=ssl_context(config))
    try:
        yield app
    finally:
        server.close()
