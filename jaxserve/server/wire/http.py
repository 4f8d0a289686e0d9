"""HTTP on the wire: uvicorn's protocol on httptools, with limits on the size and the duration of headers.

A request is parsed here, before the application sees it, and so is input that never becomes one. Clients may pipeline
requests, and may half-close the connection before they have read all answers.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, override

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxserve.server.wire.errors import ErrorBody, ErrorDetail, encode_error

MAX_HEAD_BYTES = 256 * 1024
"""Maximum bytes of the request line and headers together, before the limits of `middleware` apply."""

MAX_UNREAD_BYTES = 64 * 1024
"""Maximum bytes of pipelined requests that a connection buffers; then receiving pauses."""

ASK_INTERVAL = 1.0
"""Seconds between checks if a client that cannot send anything any more is still there."""

LATENESS = 1.0
"""Seconds by which this process may be late, e.g. because it was paused, before a client's time limit is extended."""

OTHER_VERSIONS = frozenset(("0.9", "2.0"))
"""Versions of HTTP that are refused as soon as a request's first line has named them, or has named none."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

WRITE_CHUNK = "jaxserve.write_chunk"
"""An ASGI extension: `write(data)` sends a piece of a stream past the middleware, which only looks at the head.

This saves a tenth of the CPU time per token. A stream may put bytes that its reader ignores in `filler`.
"""


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    `receive_timeout` is in seconds, for a request's head, from its first byte or the connection's start, and again for
    its body. `allowed_origins` are the origins whose pages may read refusals.

    Requests are answered one after another: `_answering` is the current one, `cycle` the last one that has been parsed,
    `pipeline` those in between, including `cycle`. Refusals are sent in turn too.
    """

    receive_timeout: float
    allowed_origins: frozenset[bytes]
    parser: httptools.HttpRequestParser

    @override
    def connection_made(self, transport: Any) -> None:
        """Accept the connection, and wait for a first request. uvloop's transports do not subclass
        asyncio.Transport.
        """
        self.url = b""
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._unread = bytearray()  # received after the requests in `pipeline`
        self._refusal: bytes | None = None  # answer to invalid input, the last to be sent
        self._has_ended = False  # the client sends nothing more
        self._asking: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await("headers")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up, and notify the application that works on an answer."""
        self._stop_timer()
        self._stop_asking()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        self._unread.clear()
        super().connection_lost(exc)

    @override
    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Handle a client that has half-closed the connection or gone, which cannot be distinguished; requests are
        still answered.
        """
        if self.scheme == "https" or not self._is_answering:  # TLS closes both directions at once
            return False
        self._has_ended = True
        if not self._unread:
            self._drop_unfinished()
        self._keep_asking()
        return not self.transport.is_closing()

    @override
    def data_received(self, data: bytes) -> None:
        """Parse data, or buffer it while parsed requests wait for their turn."""
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            return
        if self.pipeline or self._unread:
            self._unread += data
            if len(self._unread) > MAX_UNREAD_BYTES:
                self.flow.pause_reading()
                self._keep_asking()
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse data, counting the bytes of an incomplete head."""
        self._head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.logger.warning("not valid HTTP: %s", error)
            self._refuse(400, "the request is not valid HTTP")
        if self._awaits != "headers":
            self._head_bytes = 0
        elif self._has_other_version(data):
            self._refuse(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "the request has too many headers, or too long ones")
        if self.pipeline:
            # a client's disconnect would go unnoticed otherwise; `data_received` limits what is read
            self.flow.resume_reading()

    def _has_other_version(self, data: bytes) -> bool:
        """Return true if the head that has begun is of a version that is not spoken, or of HTTP/0.9, which has a first
        line only: the parser names no version until it has seen more.
        """
        version = self.parser.get_http_version()
        return version in OTHER_VERSIONS or (version == "0.0" and bool(self.url) and data.endswith(b"\n"))

    def _read_on(self) -> None:
        """Parse buffered data, and close the connection if nothing more is to be answered."""
        if self.transport.is_closing() or self.pipeline:
            return
        if self._unread:
            data = bytes(self._unread)
            self._unread.clear()
            self._unset_keepalive_if_required()
            self._read(data)
        if self._has_ended:
            self._drop_unfinished()
            if not self._is_answering:
                self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _drop_unfinished(self) -> None:
        """Drop a request that has begun to arrive, and will never be complete."""
        awaited = self._awaits
        self._stop_timer()
        if awaited == "body" and not self._drop_last():
            self.transport.close()

    def _drop_last(self) -> bool:
        """Drop the last request if it still waits for its turn. Returns true if it did."""
        if not self.pipeline or self.pipeline[0][0] is not self.cycle:
            return False
        self.pipeline.popleft()
        return True

    @override
    def on_message_begin(self) -> None:
        """Start the timer at the first byte of a request."""
        super().on_message_begin()
        self._await("headers")

    @override
    def on_headers_complete(self) -> None:
        """Start the application: the head is complete."""
        if self.parser.should_upgrade():
            return  # `_parse` feeds it again
        self._await("body")
        super().on_headers_complete()
        self.scope["extensions"] = {WRITE_CHUNK: {"write": functools.partial(self._write_chunk, self.cycle)}}

    @override
    def on_message_complete(self) -> None:
        """Stop the timer: the body is complete."""
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        """Restart the timer of the next request, which may have begun to arrive, once an answer is sent."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._awaits:
            self._await(self._awaits)
        if self._refusal is not None and not self._is_answering:
            self.transport.write(self._refusal)
            self.transport.close()
        elif self._unread or self._has_ended:
            self.loop.call_soon(self._read_on)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, _without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _parse(self, data: bytes) -> None:
        """Parse data, ignoring every offer to upgrade the protocol, as RFC 9110 (7.8) allows.

        httptools takes what follows such a head for the new protocol, so it is fed the head again without the offer,
        and then the body.
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
                self.parser = httptools.HttpRequestParser(self)  # the old one may consider the connection closed
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)
                rest = rest[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        others = (b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%b%b\r\n" % (first, b"".join(others))

    def _write_chunk(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Write a chunk of a body of undeclared length; False if it must go through `send`, which can wait."""
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _await(self, what: str, seconds: float | None = None) -> None:
        self._stop_timer()
        self._awaits = what
        seconds = self.receive_timeout if seconds is None else seconds
        self._due = self.loop.time() + seconds
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        self._awaits = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self._is_answering and (self.pipeline or self._awaits == "headers"):
            self._await(self._awaits)  # the previous request is being answered, and nothing is read meanwhile
        elif (lateness := self.loop.time() - self._due) > LATENESS:
            self._await(self._awaits, lateness)  # it may have arrived in that time
        else:
            self._refuse(408, f"the request's {self._awaits} took too long to arrive")

    def _refuse(self, status: int, message: str) -> None:
        """Answer the last input with an error, and process nothing that follows it."""
        is_request = self._awaits == "body"  # the application has it already
        self._stop_timer()
        if self.transport.is_closing():
            return
        if is_request and not self._drop_last() and self.cycle.response_started:
            self.transport.close()
            return
        detail = ErrorDetail(message=message, type="invalid_request_error")
        body = encode_error(status, ErrorBody(detail), path=self.url.partition(b"?")[0].decode("latin-1"))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self._refusal = STATUS_LINE[status] + head + self._cors_header() + b"\r\n" + body
        if not self._is_answering or (self._answering is self.cycle and is_request):
            self.transport.write(self._refusal)
            self.transport.close()

    def _keep_asking(self) -> None:
        """Check periodically if a client is still there when its end of the connection shows nothing any more."""
        if self._asking is None:
            self._asking = self.loop.call_later(ASK_INTERVAL, self._ask)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _ask(self) -> None:
        """Send bytes that a client ignores: if it has closed its socket, its system resets the connection, and the next
        write fails.
        """
        self._asking = None
        if self.transport.is_closing() or not (self._has_ended or self.flow.read_paused):
            return
        cycle = self._answering
        if cycle is not None and not cycle.response_complete and not self.flow.write_paused:
            self.transport.write(self._filler(cycle))
        self._keep_asking()

    def _filler(self, cycle: RequestResponseCycle) -> bytes:
        """Return bytes that may be inserted between the written part of this answer and the rest."""
        if not cycle.response_started:
            return CONTINUE if cycle.scope["http_version"] == "1.1" else b""
        scope: Scope = cycle.scope  # pyright: ignore[reportAssignmentType]
        filler: bytes = scope["extensions"][WRITE_CHUNK].get("filler", b"")
        return b"%x\r\n%b\r\n" % (len(filler), filler) if filler and cycle.chunked_encoding else filler

    def _cors_header(self) -> bytes:
        """Return the header that CORS requires, as far as the request's head is known."""
        origin = next((value for name, value in self.headers or () if name == b"origin"), None)
        if origin is None or self.allowed_origins.isdisjoint((origin, b"*")):
            return b""
        return b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wrap `app` for a client of HTTP/1.0, for whom a body of undeclared length ends with the connection."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        is_declared = True

        async def send_plain(message: Message) -> None:
            nonlocal is_declared
            if message["type"] == "http.response.start":
                is_declared = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if is_declared else False
            elif not is_declared:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn refuses more than it expects
            await send(message)

        await app(scope, receive, send_plain)

    return plain


def protocol_class(receive_timeout: float, allowed_origins: Sequence[str]) -> type[Any]:
    """Return HttpProtocol with these settings as a class, which uvicorn requires."""
    origins = frozenset(origin.encode() for origin in allowed_origins)
    return type("HttpProtocol", (HttpProtocol,), {"receive_timeout": receive_timeout, "allowed_origins": origins})
