"""Request ids, in and out, the counts of HTTP requests, and the access log. Outermost middleware."""

import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.logs import FIELDS
from jaxserve.metrics import Metrics

logger = logging.getLogger("jaxserve.access")

HEADER = "x-request-id"
_HEADER = HEADER.encode()
_ANTHROPIC_HEADER = b"request-id"  # where Anthropic's clients look for it
_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # safe in a header and in a log line
QUIET_PATHS = frozenset({"/live", "/health", "/ping", "/load", "/metrics", "/engine/state"})  # polled every few seconds
_CLIENT_GONE = 499


class Observation:
    """Gives each request its id (the client's X-Request-Id, else a new one); counts and logs it when it has ended.

    The id is in `scope["request_id"]` from here on, and in the answer's X-Request-Id and
    Request-Id.
    """

    def __init__(self, app: ASGIApp, *, logs: bool, metrics: Metrics, routes: Sequence[Route]):
        self._app = app
        self._logs = logs
        self._metrics = metrics
        self._patterns = [(route.path_regex, route.path) for route in routes if "{" in route.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["request_id"] = request_id.decode()
        status = _CLIENT_GONE
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        start = time.monotonic()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id) for name in (_HEADER, _ANTHROPIC_HEADER)]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            seconds = time.monotonic() - start
            self._metrics.answered(scope["method"], self._route(path), status=status, seconds=seconds)
            if self._logs:
                _log(scope, status=status, seconds=seconds)

    def _route(self, path: str) -> str:
        """Return the path of a request's route, or the path itself if that has no parameters."""
        return next((template for pattern, template in self._patterns if pattern.match(path)), path)


def _log(scope: Scope, *, status: int, seconds: float) -> None:
    fields = {
        "request_id": scope["request_id"],
        "client": scope["client"][0] if scope["client"] else "",
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
    }
    # The client chooses the path: it is quoted, so that it cannot forge a line.
    logger.log(
        logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO,
        "%(client)s %(method)s %(path)r %(status)d %(seconds).3f s id=%(request_id)s",
        fields,
        extra={FIELDS: fields},
    )
