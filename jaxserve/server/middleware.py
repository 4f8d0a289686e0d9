"""What every request passes before a route sees it: limits, the key, and the door that closes when the server drains.

Pure ASGI, so that a stream passes through untouched. From the outside: Limits, Authentication, Door.
"""

import hashlib
import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import error_body, error_response, refusal
from jaxserve.server.state import server_state

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024  # names and values together

OPEN_PATHS = frozenset({"/live", "/health"})  # answered without a key
PROBE_PATHS = OPEN_PATHS | {"/metrics", "/version"}  # answered while draining, and never waited for


class Limits:
    """Refuses too many headers (431) and bodies over `max_body_size` bytes (413), declared or sent."""

    def __init__(self, app: ASGIApp, max_body_size: int):
        self._app = app
        self._max_body_size = max_body_size
        self._message = f"the request body is larger than {max_body_size} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body as it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            await refusal(431, "the request has too many headers, or too long ones")(scope, receive, send)
            return
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        if int(declared) > self._max_body_size:  # the HTTP parser lets nothing but digits through
            await refusal(413, self._message, headers={"connection": "close"})(scope, receive, send)
            return
        num_received = 0

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_size:
                raise HTTPException(413, self._message, {"connection": "close"})
            return message

        await self._app(scope, counted, send)


class Authentication:
    """Asks for `Authorization: Bearer <api_key>` on every path but OPEN_PATHS, known or not. No key: all may enter."""

    def __init__(self, app: ASGIApp, api_key: str | None):
        self._app = app
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it may enter."""
        if scope["type"] == "lifespan" or self._digest is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Digests have one length, so that not even the key's length shows in the time this takes.
        if hmac.compare_digest(_digest(key.strip()), self._digest) and scheme.lower() == b"bearer":
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        await refusal(401, message, headers={"www-authenticate": "Bearer"})(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Door:
    """Counts the requests inside, and lets none but probes in when the server drains or its engine is dead (503)."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if the door is open."""
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        state = server_state(scope)
        closed = state.why_closed()
        if closed is not None:
            await error_response(closed.status, error_body(closed))(scope, receive, send)
            return
        with state.counted():
            await self._app(scope, receive, send)
