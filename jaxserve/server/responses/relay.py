"""Relay the events of a background response to the client that has asked to stream them."""

import asyncio

from jaxserve.server.wire.streaming import Write


class Relay:
    """Passes frames from one task to another. If the reader ends first, frames are dropped, and the writer goes on."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._has_news = asyncio.Event()
        self._is_read = True
        self._has_ended = False

    def __call__(self, frame: bytes, /) -> None:
        """Pass a frame on."""
        if self._is_read:
            self._frames.append(frame)
            self._has_news.set()

    async def drain(self) -> None:
        """Give other tasks a turn; the writer does not wait for a slow reader."""
        await asyncio.sleep(0)

    def end(self) -> None:
        """Mark the end of the frames."""
        self._has_ended = True
        self._has_news.set()

    async def copy(self, write: Write) -> None:
        """Write frames as they arrive, until the end. Raises RequestFailed when they are read too slowly."""
        try:
            while not self._has_ended or self._frames:
                await self._has_news.wait()
                self._has_news.clear()
                frames, self._frames = self._frames, []
                for frame in frames:
                    write(frame)
        finally:
            self._is_read = False
            self._frames = []
