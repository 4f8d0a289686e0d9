"""The end of a request's path: work that stops when its client has gone, and server-sent events.

A coroutine does the work, and its cancellation aborts what runs in the engine. This module ensures that it is cancelled
when it should be, whatever happens.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, override

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.errors import Draining, JaxserveError, RequestFailed
from jaxserve.server.wire.body import encoded
from jaxserve.server.wire.errors import error_body
from jaxserve.server.wire.http import WRITE_CHUNK

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
FILLER = b":\n\n"
"""A comment, which readers of server-sent events ignore."""

MAX_HELD_BYTES = 16 * 2**20
"""Maximum bytes buffered for a slow reader of one stream: some 80,000 tokens, or 10,000 with 20 logprobs each."""

MAX_ALL_HELD_BYTES = 256 * 2**20
"""Maximum bytes buffered for slow readers in an API process."""

MAX_SENT_BYTES = 256 * 2**10
"""Bytes passed to a connection at a time (at least one frame); from then on they no longer count as buffered."""


class Write(Protocol):
    """A function that writes a stream."""

    def __call__(self, frame: bytes, /) -> None:
        """Send a frame, now or later. Raises RequestFailed when too much is buffered already."""
        ...

    async def drain(self) -> None:
        """Give other tasks a turn, and wait until the connection has taken every frame."""
        ...


_encode_text = msgspec.json.Encoder().encode


def event(data: msgspec.Struct) -> bytes:
    """Encode one server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


def large_event(data: msgspec.Struct) -> bytes:
    """Encode one server-sent event; any list in `data` may be an EncodedList."""
    return b"".join([b"data: ", *encoded(data), b"\n\n"])


class TextEvents:
    """Events that differ from each other in the text only: the rest is encoded once per choice."""

    def __init__(self, make: Callable[[int, str], msgspec.Struct]):
        """`make(index, text)` is the event in which choice `index` says `text`, and nothing else."""
        self._make = make
        self._mark = uuid.uuid4().hex  # placeholder of the text
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """Encode one server-sent event."""
        frame = self._frames.get(index)
        if frame is None:
            head, _, tail = event(self._make(index, self._mark)).partition(b'"%b"' % self._mark.encode())
            frame = self._frames[index] = (head, tail)
        return b"%b%b%b" % (frame[0], _encode_text(text), frame[1])


async def while_wanted[T](work: Coroutine[Any, Any, T], *, receive: Receive, stopping: asyncio.Event) -> T:
    """Return the result of `work`, which is cancelled, and awaited, when it is no longer needed.

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
    """Return when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def failure_event(error: Exception) -> bytes:
    """Return the server-sent event that reports why a stream has failed."""
    return event(error_body(error))


class EventStream(Response):
    """Runs `work` with a function that sends a frame (as made by `event`), and sends `done` when it returns.

    Nothing is sent before the first frame, so that an earlier failure is answered with its own status. For a later one,
    including the server's stop, `tell_failure` makes the frames that precede `done`.
    """

    def __init__(
        self,
        work: Callable[[Write], Awaitable[None]],
        *,
        slow_readers: "SlowReaders",
        stopping: asyncio.Event,
        done: bytes = DONE,
        tell_failure: Callable[[Exception], Awaitable[bytes]] = failure_event,
    ):
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._work = work
        self._slow_readers = slow_readers
        self._done = done
        self._stopping = stopping
        self._tell_failure = tell_failure

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        extension = scope.get("extensions", {}).get(WRITE_CHUNK, {"write": _cannot})
        extension["filler"] = FILLER
        frames = _Frames(self.raw_headers, send, extension["write"], self._slow_readers)
        try:
            await while_wanted(self._run(frames), receive=receive, stopping=self._stopping)
        except ClientDisconnect:
            return
        except Exception as error:
            if not frames.is_begun:
                raise
            if not isinstance(error, JaxserveError):
                logger.exception("a stream failed")
            await frames.end(await self._tell_failure(error))
        finally:
            frames.drop()
        await send(_body(self._done, more=False))

    async def _run(self, frames: "_Frames") -> None:
        async with frames.bounded():
            sending = asyncio.create_task(frames.keep_sending())
            try:
                await self._work(frames)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await frames.flush()


class SlowReaders:
    """The streams of a process that have buffered frames."""

    def __init__(self) -> None:
        self._streams: set[_Frames] = set()
        self._num_held_bytes = 0

    def count(self, stream: "_Frames", num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to what the stream has buffered."""
        self._num_held_bytes += num_bytes
        (self._streams.add if stream.num_held_bytes else self._streams.discard)(stream)

    def make_room(self) -> None:
        """While more than MAX_ALL_HELD_BYTES are buffered in this process, end the stream with the largest backlog."""
        while self._num_held_bytes > MAX_ALL_HELD_BYTES:
            max(self._streams, key=lambda stream: stream.num_held_bytes).give_up(
                f"of all streams more than {MAX_ALL_HELD_BYTES} bytes are waiting, and most of this"
            )


class _Frames:
    """The frames of one answer, in order: each is sent at once if the connection takes it, else buffered.

    The head of the response is sent before the first. A reader so slow that too much is buffered loses the buffer and
    its stream.

    Attributes:
        num_held_bytes: number of buffered bytes.
    """

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        send: Send,
        write_chunk: Callable[[bytes], bool],
        slow_readers: SlowReaders,
    ):
        self.num_held_bytes = 0
        self._headers = headers
        self._send = send
        self._write_chunk = write_chunk
        self._slow_readers = slow_readers
        self._is_head_sent = False
        self._is_direct = False  # frames can be written without waiting
        self._held: list[bytes] = []
        self._has_held = asyncio.Event()
        self._has_none_held = asyncio.Event()
        self._has_stopped_sending = False
        self._scope: asyncio.Timeout | None = None
        self._error: RequestFailed | None = None

    @property
    def is_begun(self) -> bool:
        """True if the client has received something, or will."""
        return self._is_head_sent or bool(self._held)

    def __call__(self, frame: bytes, /) -> None:
        """Send a frame, now or later. Raises RequestFailed when too much is buffered already, for this stream or
        all.
        """
        if self._is_direct and self._write_chunk(frame):
            return
        if self.num_held_bytes > MAX_HELD_BYTES:
            self.give_up(f"more than {MAX_HELD_BYTES} bytes of it are waiting")
        self._slow_readers.make_room()
        if self._error is not None:
            raise self._error
        self._hold(frame)

    def give_up(self, why: str) -> None:
        """Drop what is buffered, and end what is `bounded`."""
        self._error = RequestFailed(f"the stream is read too slowly: {why}")
        self.drop()
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def drain(self) -> None:
        """Give other tasks a turn, and wait until nothing is buffered, as long as `keep_sending` runs."""
        await asyncio.sleep(0)
        if self._held and not self._has_stopped_sending:
            await self._has_none_held.wait()

    def drop(self) -> None:
        """Drop what is buffered."""
        self._held.clear()
        self._count(-self.num_held_bytes)

    @contextlib.asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Run a block that `give_up` cancels, raising RequestFailed then."""
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if self._error is None:
                raise
        finally:
            self._scope = None
        if self._error is not None:
            raise self._error

    async def end(self, failure: bytes) -> None:
        """Send what is buffered, unless it is too much, and then `failure`."""
        self._error = None
        try:
            async with self.bounded():
                self._hold(failure)
                await self.flush()
        except RequestFailed:
            self._hold(failure)
            await self.flush()

    async def keep_sending(self) -> None:
        """Send what is buffered, until cancelled."""
        try:
            while True:
                await self._has_held.wait()
                await self.flush()
        finally:
            self._has_stopped_sending = True
            self._has_none_held.set()

    async def flush(self) -> None:
        """Wait until nothing is buffered. What has not been sent when this is cancelled is still buffered."""
        if self._held and not self._is_head_sent:
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._is_head_sent = True
        while self._held:
            data = self._join_first()
            await self._send(_body(data))
            if self._held and self._held[0] is data:  # unless it was dropped meanwhile
                del self._held[0]
                self._count(-len(data))
        self._has_held.clear()
        self._has_none_held.set()
        self._is_direct = self._is_head_sent and self._error is None

    def _join_first(self) -> bytes:
        """Join the next frames to be sent into one, which becomes the first of the buffer."""
        count = num_bytes = 0
        while count < len(self._held) and num_bytes < MAX_SENT_BYTES:
            num_bytes += len(self._held[count])
            count += 1
        data = b"".join(self._held[:count])
        self._held[:count] = [data]
        return data

    def _hold(self, frame: bytes) -> None:
        self._is_direct = False
        self._held.append(frame)
        self._count(len(frame))
        self._has_held.set()
        self._has_none_held.clear()

    def _count(self, num_bytes: int) -> None:
        self.num_held_bytes += num_bytes
        self._slow_readers.count(self, num_bytes)


def _cannot(_frame: bytes) -> bool:
    return False


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
