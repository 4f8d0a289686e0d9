"""The ASGI application as data: routes, middleware, exception handlers; its state comes through the lifespan."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.errors import JaxserveError
from jaxserve.server.middleware.admission import Authentication, Door, Faults, Limits, Syntax
from jaxserve.server.middleware.keys import admin_keys, client_keys
from jaxserve.server.middleware.observation import QUIET_PATHS, Observation
from jaxserve.server.middleware.root_path import RootPath
from jaxserve.server.routes import admin, openapi, pages, utility
from jaxserve.server.state import ServerState, lifespan_state
from jaxserve.server.tracing import Traces
from jaxserve.server.wire import errors

ROUTES = (
    *(Route(each.path, each.run, methods=[each.method]) for each in openapi.OPERATIONS if not each.is_admin),
    Route("/metrics", utility.metrics, methods=["GET"]),
    Route("/openapi.json", openapi.show, methods=["GET"]),
    *(Route(path, pages.show, methods=["GET"]) for path in sorted(pages.FILES)),
    *(Route(path, admin.not_implemented, methods=["POST"]) for path in admin.NOT_IMPLEMENTED),
)
ADMIN_ROUTES = tuple(Route(each.path, each.run, methods=[each.method]) for each in openapi.OPERATIONS if each.is_admin)
ADMIN_PATHS = frozenset(route.path for route in ADMIN_ROUTES)
METHODS_AND_PATHS = [
    (method, route.path)
    for route in (*ROUTES, *ADMIN_ROUTES)
    for method in sorted(route.methods or ())
    if method != "HEAD"
]

EXCEPTION_HANDLERS = {
    JaxserveError: errors.on_jaxserve_error,
    HTTPException: errors.on_http_exception,
    sqlite3.Error: errors.on_store_error,
    ClientDisconnect: errors.on_disconnect,
    RecursionError: errors.on_recursion_error,
}


def create_app(state: ServerState, config: ServerConfig) -> Starlette:
    """Return the application that serves `state` under the limits and keys of `config`. Raises ConfigError."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[dict[str, Any]]:
        state.grammars.pool.start()  # so that the first grammar need not wait for its processes
        try:
            yield lifespan_state(state)
        finally:
            await asyncio.to_thread(state.grammars.pool.close)

    keys_of_admin = admin_keys(config)
    admin_routes = (
        ADMIN_ROUTES if keys_of_admin else [Route(path, admin.off, methods=["POST"]) for path in sorted(ADMIN_PATHS)]
    )
    routes = [*ROUTES, *admin_routes]
    middleware = [
        Middleware(Faults),
        Middleware(Syntax),
        Middleware(Limits, max_body_size=config.max_body_size),
        Middleware(
            Authentication,
            keys=client_keys(config),
            admin_keys=keys_of_admin,
            admin_paths=ADMIN_PATHS,
            open_paths=pages.OPEN_PATHS,
        ),
        Middleware(Door),
    ]
    if config.allowed_origins:  # outermost: a browser first asks without a key, and must be able to read a refusal
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["retry-after", "x-request-id", "request-id"],
        )
        middleware.insert(0, cors)
    if state.tracing is not None:
        middleware.insert(0, Middleware(Traces, tracing=state.tracing, routes=routes, quiet_paths=QUIET_PATHS))
    middleware.insert(0, Middleware(Observation, logs=config.access_log, metrics=state.metrics, routes=routes))
    if config.root_path:
        middleware.insert(0, Middleware(RootPath, root_path=config.root_path))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS, lifespan=lifespan)
