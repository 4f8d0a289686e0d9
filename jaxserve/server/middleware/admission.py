"""Admission of requests before a route sees them: limits, the key, and refusals while the server drains.

Pure ASGI, so that streams pass through unchanged. In order from the outside: Faults, Syntax, Limits, Authentication,
Door.
"""

import asyncio
import contextlib
import logging
import re

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.middleware.keys import Keys
from jaxserve.server.state import server_state
from jaxserve.server.wire.errors import ErrorResponse, error_body, refusal

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024  # names and values together
MAX_HELD_BYTES = 2**27  # of all bodies of unanswered requests together
FREE_BODY_BYTES = 2**16  # of each body, not counted, so that large bodies do not keep small ones out
MAX_DISCARDED_BYTES = 2**26  # of a body that is too large
LINGERING_SECONDS = 5.0  # in which they must arrive

_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*", re.ASCII)  # RFC 3986, 3.2.2; it may be empty

PROBE_PATHS = frozenset({"/live", "/health", "/ping", "/load", "/metrics", "/version", "/engine/state"})
"""Paths answered while draining, which a draining server does not wait for."""


class Faults:
    """Logs a bug and answers it (500): inside CORS, so that a page can read this answer like any other."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. A failure after the answer has begun is left to whoever owns the connection."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or has_begun:
                raise
            logger.exception("a request failed")
            await ErrorResponse(500, error_body(error))(scope, receive, send)


class Syntax:
    """Refuses what no server may accept as a request, or this one cannot read: versions other than HTTP/1.0 and 1.1
    (505), not exactly one Host in HTTP/1.1 (400), compressed bodies (415).
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        refused = _syntax_error(scope) if scope["type"] == "http" else None
        await (self._app if refused is None else refused)(scope, receive, send)


def _syntax_error(scope: Scope) -> Response | None:
    version = scope["http_version"]
    if version not in ("1.0", "1.1"):
        return refusal(505, f"HTTP/{version} is not supported: use HTTP/1.1", headers={"connection": "close"})
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return refusal(400, f"the request has {len(hosts)} Host headers: send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return refusal(400, "the Host header is not the name or the address of a host")
    encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
    if any(encoding.strip().lower() not in (b"", b"identity") for encoding in encodings):
        message = "the body has a Content-Encoding: send it as it is"
        return refusal(415, message, headers={"accept-encoding": "identity"})
    return None


class Limits:
    """Refuses too many headers (431), bodies over `max_body_size` bytes, declared or sent (413), and bodies that arrive
    while MAX_HELD_BYTES of unanswered ones are in memory (503).

    Up to MAX_DISCARDED_BYTES more of a refused body are read, for at most LINGERING_SECONDS, before the connection is
    closed: a client that reads only after sending everything would otherwise see a reset instead of the answer.
    """

    def __init__(self, app: ASGIApp, max_body_size: int):
        self._app = app
        self._max_body_size = max_body_size
        self._max_held = max(MAX_HELD_BYTES, 2 * max_body_size)
        self._num_held = 0
        self._message = f"the request body is larger than {max_body_size} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body as it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        waits = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
        receive, send = _lingering(receive, send, waits_to_be_told=waits)
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            await refusal(431, "the request has too many headers, or too long ones")(scope, receive, send)
            return
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        if int(declared) > self._max_body_size:  # the HTTP parser only lets digits through
            await refusal(413, self._message, headers={"connection": "close"})(scope, receive, send)
            return
        num_received = num_counted = 0
        is_answered = False

        def count(num_bytes: int) -> None:
            nonlocal num_counted
            self._num_held += num_bytes - num_counted
            num_counted = num_bytes

        async def counted() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_size:
                raise HTTPException(413, self._message, {"connection": "close"})
            if num_received > FREE_BODY_BYTES and not is_answered:
                count(num_received - FREE_BODY_BYTES)
                if self._num_held > self._max_held:
                    raise HTTPException(503, "too many large requests are being sent", _COME_AGAIN)
            return message

        async def send_and_release(message: Message) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                count(0)
            await send(message)

        try:
            await self._app(scope, counted, send_and_release)
        finally:
            count(0)


_COME_AGAIN = {"connection": "close", "retry-after": "1"}


def _lingering(receive: Receive, send: Send, *, waits_to_be_told: bool) -> tuple[Receive, Send]:
    """Wrap `receive` and `send` so that an answer that closes the connection, such as a refusal, ends only after the
    body.

    The answer is sent at once, and the body is read up to a limit. A client with `waits_to_be_told` sends no body
    before something is received.
    """
    is_last, has_ended = False, waits_to_be_told

    async def receive_part() -> Message:
        nonlocal has_ended
        message = await receive()
        has_ended = not message.get("more_body", False)
        return message

    async def send_and_linger(message: Message) -> None:
        nonlocal is_last
        if message["type"] == "http.response.start":
            is_last = (b"connection", b"close") in message["headers"]
        if not is_last or message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        num_discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGERING_SECONDS):
                while not has_ended and num_discarded <= MAX_DISCARDED_BYTES:
                    num_discarded += len((await receive_part()).get("body", b""))
        await send({"type": "http.response.body", "body": b""})

    return receive_part, send_and_linger


class Authentication:
    """Requires one of `keys` on every path but `open_paths`, known or not. Without keys everyone is admitted.

    `admin_paths` require one of `admin_keys` instead. From here on `scope["owner"]` names the key, "" if there is none.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, admin_keys: Keys, admin_paths: frozenset[str], open_paths: frozenset[str]
    ):
        self._app = app
        self._open_paths = open_paths
        self._keys = keys
        self._admin_keys = admin_keys
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if its key is valid."""
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        is_admin = bool(self._admin_keys) and scope["path"] in self._admin_paths
        keys = self._admin_keys if is_admin else self._keys
        headers = dict(reversed(scope["headers"]))  # the first of several
        given = headers.get(b"authorization", b"")
        if given[:7].lower() != b"bearer ":
            given = b"Bearer " + headers.get(b"x-api-key", b"")
        owner = keys.owner(given) if keys else ""
        if owner is not None:
            scope["owner"] = owner
            await self._app(scope, receive, send)
            return
        message = (
            f"the {'admin ' if is_admin else ''}API key is missing or wrong: send 'Authorization: Bearer KEY' or "
            "'X-Api-Key: KEY'"
        )
        await refusal(401, message, headers={"www-authenticate": "Bearer"})(scope, receive, send)


class Door:
    """Counts running requests, and admits only probes while the server drains or its engine is dead (503)."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless the server is closed."""
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        life = server_state(scope).life
        closed = life.why_closed()
        if closed is not None:
            await ErrorResponse(closed.status, error_body(closed))(scope, receive, send)
            return
        with life.counted():
            await self._app(scope, receive, send)
