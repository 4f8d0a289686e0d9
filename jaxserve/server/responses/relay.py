"""The events of a response in the background, on their way to the client that has asked to see them as they come."""

import asyncio

from jaxserve.server.streaming import Write


class Relay:
    """Frames from one task to another, which may end before: then they are dropped, and whoever writes goes on."""

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
        """Let others have their turn: who reads may be slow, who writes does not wait for them."""
        await asyncio.sleep(0)

    def end(self) -> None:
        """Nothing more will come."""
        self._has_ended = True
        self._has_news.set()

    async def copy(self, write: Write) -> None:
        """Write what comes, until the end. Raises RequestFailed when it is read too slowly."""
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
