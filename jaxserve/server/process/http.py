"""HTTP on the wire: uvicorn's protocol on httptools, with limits on how large headers get and how long they take.

A request is parsed here, long before the application sees it, and so are those that never become one. Clients may send
several requests at once, and may end their side of the connection before they have read all answers.
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

MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of requests behind one that waits for its turn which a connection holds; of more nothing is received."""

ASK_INTERVAL = 1.0
"""Seconds after which a client that can say nothing any more is asked whether it is still there, again and again."""

LATENESS = 1.0
"""Seconds by which this process may be late, for having been paused, say, before a client gets as long once more."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

WRITE_CHUNK = "jaxserve.write_chunk"
"""An ASGI extension: `write(data)` sends a piece of a stream past the middleware, all of which looks at a response's
first message only. A token costs a tenth less CPU time that way. A stream may put in `filler` what its reader ignores.
"""


class HttpProtocol(HttpToolsProtocol):
    """One connection. `receive_timeout`: seconds for a request's head, from its first byte or the connection's start,
    and once more for its body. `allowed_origins`: whose pages may read what is refused here.

    Requests are answered one after the other: `_answering` is the one whose turn it is, `cycle` the last one that has
    been parsed, `pipeline` those between them, that one included. What is refused here is answered in its turn too.
    """

    receive_timeout: float
    allowed_origins: frozenset[bytes]
    parser: httptools.HttpRequestParser

    @override
    def connection_made(self, transport: Any) -> None:
        """Take the connection, and wait for a first request. uvloop's transports are no asyncio.Transport."""
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._unread = bytearray()  # behind what `pipeline` has
        self._refusal: bytes | None = None  # the answer to what is no request: the last one
        self._has_ended = False  # the client sends nothing more
        self._asking: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await("headers")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and tell whoever works on an answer."""
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
        """The client has ended its side, or has gone: it is hard to tell. What it has sent is answered all the same."""
        if self.scheme == "https" or not self._is_answering:  # TLS ends both sides at once
            return False
        self._has_ended = True
        if not self._unread:
            self._drop_unfinished()
        self._keep_asking()
        return not self.transport.is_closing()

    @override
    def data_received(self, data: bytes) -> None:
        """Parse, unless requests wait that have been parsed already."""
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
        """Parse, counting the bytes of a head that is not yet complete."""
        self._head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.logger.warning("not valid HTTP: %s", error)
            self._refuse(400, "the request is not valid HTTP")
        if self._awaits != "headers":
            self._head_bytes = 0
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "the request has too many headers, or too long ones")
        if self.pipeline:
            self.flow.resume_reading()  # or nobody would see the client go: `data_received` says how much is read

    def _read_on(self) -> None:
        """Parse what has had to wait, and close the connection if nothing more is to be answered."""
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
        """Forget the request that has begun to come, and will never be complete."""
        awaited = self._awaits
        self._stop_timer()
        if awaited == "body" and not self._drop_last():
            self.transport.close()

    def _drop_last(self) -> bool:
        """Forget the last request if it still waits for its turn. Returns whether it did."""
        if not self.pipeline or self.pipeline[0][0] is not self.cycle:
            return False
        self.pipeline.popleft()
        return True

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
            self._await(self._awaits)  # a request before this one is being answered, and nothing is read meanwhile
        elif (lateness := self.loop.time() - self._due) > LATENESS:
            self._await(self._awaits, lateness)  # it may have come in that time
        else:
            self._refuse(408, f"the request's {self._awaits} took too long to arrive")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what has come last, and nothing that comes behind it."""
        is_request = self._awaits == "body"  # the application knows it
        self._stop_timer()
        if self.transport.is_closing():
            return
        if is_request and not self._drop_last() and self.cycle.response_started:
            self.transport.close()
            return
        detail = ErrorDetail(message=message, type="invalid_request_error")
        body = msgspec.json.encode(ErrorBody(detail))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self._refusal = STATUS_LINE[status] + head + self._cors_header() + b"\r\n" + body
        if not self._is_answering or (self._answering is self.cycle and is_request):
            self.transport.write(self._refusal)
            self.transport.close()

    def _keep_asking(self) -> None:
        """Find out whether a client is still there whose end of the connection tells nothing any more."""
        if self._asking is None:
            self._asking = self.loop.call_later(ASK_INTERVAL, self._ask)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _ask(self) -> None:
        """Send what a client overlooks: if it has closed its socket, its system resets the connection, which the next
        write comes to know.
        """
        self._asking = None
        if self.transport.is_closing() or not (self._has_ended or self.flow.read_paused):
            return
        cycle = self._answering
        if cycle is not None and not cycle.response_complete and not self.flow.write_paused:
            self.transport.write(self._filler(cycle))
        self._keep_asking()

    def _filler(self, cycle: RequestResponseCycle) -> bytes:
        """What may stand between what has been written of this answer and what will be."""
        if not cycle.response_started:
            return CONTINUE if cycle.scope["http_version"] == "1.1" else b""
        scope: Scope = cycle.scope  # pyright: ignore[reportAssignmentType]
        filler: bytes = scope["extensions"][WRITE_CHUNK].get("filler", b"")
        return b"%x\r\n%b\r\n" % (len(filler), filler) if filler and cycle.chunked_encoding else filler

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
