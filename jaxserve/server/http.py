"""HTTP on the wire: uvicorn's protocol on httptools, with limits on how large headers get and how long they take.

A request is parsed here, long before the application sees it, and so are those that never become one.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, override

import httptools
import msgspec
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxserve.server.errors import ErrorBody, ErrorDetail

MAX_HEAD_BYTES = 256 * 1024
"""Of the request line and headers together: what comes before the limits of `middleware` can be applied."""


WRITE_CHUNK = "jaxserve.write_chunk"
"""An ASGI extension: `write(data)` sends a piece of a stream past the middleware, all of which looks at a response's
first message only. A token costs a tenth less CPU time that way.
"""


class HttpProtocol(HttpToolsProtocol):
    """One connection. `receive_timeout`: seconds for a request's head, from its first byte or the connection's start,
    and once more for its body. `allowed_origins`: whose pages may read what is refused here.
    """

    receive_timeout: float
    allowed_origins: frozenset[bytes]
    parser: httptools.HttpRequestParser

    @override
    def connection_made(self, transport: Any) -> None:
        """Take the connection, and wait for a first request. uvloop's transports are no asyncio.Transport."""
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await("headers")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        """Parse, counting the bytes of a head that is not yet complete."""
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.logger.warning("not valid HTTP: %s", error)
            self._refuse(400, "the request is not valid HTTP")
        if self._awaits != "headers":
            self._head_bytes = 0
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "the request has too many headers, or too long ones")

    @override
    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._await("headers")

    @override
    def on_headers_complete(self) -> None:
        """The head is complete: the application begins."""
        if self.parser.should_upgrade():
            return  # `_parse` has it read again
        self._await("body")
        super().on_headers_complete()
        self.scope["extensions"] = {WRITE_CHUNK: {"write": functools.partial(self._write_chunk, self.cycle)}}

    @override
    def on_message_complete(self) -> None:
        """The body is complete."""
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        """The answer is sent: what has come of the next request meanwhile has its time from now on."""
        super().on_response_complete()
        if self._awaits:
            self._await(self._awaits)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, _without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _parse(self, data: bytes) -> None:
        """Parse, and ignore every offer to change the protocol, as RFC 9110 (7.8) allows: httptools takes what follows
        such a head for the new protocol, so that it is given the head again, without the offer, and then the body.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(400, "CONNECT is for proxies, and this is none")
                    break
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)  # the old one may take the connection for closed
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)
                rest = rest[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        others = (b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%b%b\r\n" % (first, b"".join(others))

    def _write_chunk(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Send a piece of a body without a declared length; False where it has to go through `send`, which can wait."""
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _await(self, what: str) -> None:
        self._stop_timer()
        self._awaits = what
        self._timer = self.loop.call_later(self.receive_timeout, self._on_timeout)

    def _stop_timer(self) -> None:
        self._awaits = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and (self.pipeline or self._awaits == "headers"):
            self._await(self._awaits)  # a request before this one is being answered, and nothing is read meanwhile
        else:
            self._refuse(408, f"the request's {self._awaits} took too long to arrive")

    def _refuse(self, status: int, message: str) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            detail = ErrorDetail(message=message, type="invalid_request_error")
            body = msgspec.json.encode(ErrorBody(detail))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + self._cors_header() + b"\r\n" + body)
        self.transport.close()

    def _cors_header(self) -> bytes:
        """The header that CORS wants, as far as the request's head is known."""
        origin = next((value for name, value in self.headers or () if name == b"origin"), None)
        if origin is None or self.allowed_origins.isdisjoint((origin, b"*")):
            return b""
        return b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """`app` for a client of HTTP/1.0, to whom a body without a declared length ends with the connection."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        is_declared = True

        async def send_plain(message: Message) -> None:
            nonlocal is_declared
            if message["type"] == "http.response.start":
                is_declared = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if is_declared else False
            elif not is_declared:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn takes no more than it expects
            await send(message)

        await app(scope, receive, send_plain)

    return plain


def protocol_class(receive_timeout: float, allowed_origins: Sequence[str]) -> type[Any]:
    """HttpProtocol with these settings, as uvicorn wants it: a class."""
    origins = frozenset(origin.encode() for origin in allowed_origins)
    return type("HttpProtocol", (HttpProtocol,), {"receive_timeout": receive_timeout, "allowed_origins": origins})
