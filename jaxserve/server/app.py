"""The ASGI application as data: routes, middleware, exception handlers; its state comes through the lifespan."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.errors import JaxserveError
from jaxserve.server import errors
from jaxserve.server.middleware import Authentication, Door, Limits
from jaxserve.server.routes import chat, completions, models, openapi, utility
from jaxserve.server.state import ServerState, lifespan_state

ROUTES = (
    Route("/v1/completions", completions.create, methods=["POST"]),
    Route("/v1/chat/completions", chat.create, methods=["POST"]),
    Route("/v1/models", models.index, methods=["GET"]),
    Route("/v1/models/{model:path}", models.show, methods=["GET"]),
    Route("/tokenize", utility.tokenize, methods=["POST"]),
    Route("/detokenize", utility.detokenize, methods=["POST"]),
    Route("/health", utility.health, methods=["GET"]),
    Route("/live", utility.live, methods=["GET"]),
    Route("/version", utility.version, methods=["GET"]),
    Route("/metrics", utility.metrics, methods=["GET"]),
    Route("/openapi.json", openapi.show, methods=["GET"]),
)

EXCEPTION_HANDLERS = {
    JaxserveError: errors.on_jaxserve_error,
    HTTPException: errors.on_http_exception,
    ClientDisconnect: errors.on_disconnect,
    Exception: errors.on_exception,
}


def create_app(state: ServerState, config: ServerConfig) -> Starlette:
    """The application that serves `state` under the limits and the key of `config`."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[dict[str, Any]]:
        yield lifespan_state(state)

    return Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(Limits, max_body_size=config.max_body_size),
            Middleware(Authentication, api_key=config.api_key),
            Middleware(Door),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
