"""The last stretch of a request: work that stops when its client has gone, and server-sent events.

A generator of bytes does the work; its `finally` is the one place that aborts what runs in the engine. Everything here
only sees to it that it is closed, whatever happens.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, override

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.errors import Draining, JaxserveError
from jaxserve.server.errors import error_body

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


async def while_wanted[T](work: Coroutine[Any, Any, T], *, receive: Receive, stopping: asyncio.Event) -> T:
    """The result of `work`, which is cancelled, and waited for, when nobody wants it any more.

    Raises ClientDisconnect when the client goes, Draining when `stopping` is set, and what `work` raises.
    """
    result = asyncio.create_task(work)
    disconnected = asyncio.create_task(_disconnected(receive))
    tasks = (result, disconnected, asyncio.create_task(stopping.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        if disconnected.done():
            raise ClientDisconnect
        raise Draining("the server is shutting down")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` (frames as `event` makes them) as they come, then [DONE].

    Nothing is sent before the first event, so that a failure up to then is answered with its own status; a later one
    is an event of its own, before [DONE].
    """

    def __init__(self, events: AsyncGenerator[bytes], *, stopping: asyncio.Event):
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._events = events
        self._stopping = stopping
        self._started = False

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await while_wanted(self._send_events(send), receive=receive, stopping=self._stopping)
        except ClientDisconnect:
            return
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, JaxserveError):
                logger.exception("a stream failed")
            await send(_body(event(error_body(error))))
        await send(_body(DONE))
        await send(_body(b"", more=False))

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for frame in events:
                if not self._started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    self._started = True
                await send(_body(frame))


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
