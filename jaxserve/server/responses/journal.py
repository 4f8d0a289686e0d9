"""The events of a background response, stored as they come, so that a client may read them later or again."""

import asyncio
import logging
import sqlite3
import time

import msgspec

from jaxserve.server.protocol.responses import ResponseBody
from jaxserve.server.responses.store import ResponseStore
from jaxserve.server.responses.writer import frame, is_last, last_event, replay
from jaxserve.server.wire.streaming import Write

logger = logging.getLogger(__name__)

SAVE_INTERVAL = 0.25
"""Seconds between two writes of new events, and between two looks for them."""

WAIT_FOR_END = 5.0
"""Seconds that the last event of a complete response may take to be stored. Then its worker has ended without it."""


class Relay:
    """Passes frames from one task to another. If the reader ends first, frames are dropped, and the writer goes on."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_read = True

    def __call__(self, frame: bytes | None, /) -> None:
        """Pass a frame on; None is the end."""
        if self._is_read:
            self._frames.put_nowait(frame)

    async def copy(self, write: Write) -> None:
        """Write frames as they arrive, until the end. Raises RequestFailed when they are read too slowly."""
        try:
            while (frame := await self._frames.get()) is not None:
                write(frame)
        finally:
            self._is_read = False


class Journal:
    """Writes the events of one response: into the store, and to the client that has asked for it, if it reads them."""

    def __init__(self, responses: ResponseStore, response_id: str, relay: Relay | None):
        self._responses = responses
        self._response_id = response_id
        self._relay = relay
        self._unsaved: list[bytes] = []
        self._num_saved = 0

    def __call__(self, frame: bytes, /) -> None:
        """Pass an event on, and store it with the next ones."""
        self._unsaved += [each + b"\n\n" for each in frame.split(b"\n\n")[:-1]]  # there may be several
        if self._relay is not None:
            self._relay(frame)

    async def drain(self) -> None:
        """Let other tasks run."""
        await asyncio.sleep(0)

    async def keep_saving(self) -> None:
        """Store events until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL)
            await self.save()

    async def save(self) -> None:
        """Store what has come. What cannot be stored now stays for the next time."""
        frames = list(self._unsaved)
        if not frames:
            return
        try:
            await asyncio.to_thread(self._responses.add_events, self._response_id, self._num_saved, frames)
        except sqlite3.Error as error:
            logger.warning("events of the response %s could not be stored: %s", self._response_id, error)
            return
        del self._unsaved[: len(frames)]
        self._num_saved += len(frames)

    async def end(self) -> None:
        """Store the rest: nothing more will come."""
        if self._relay is not None:
            self._relay(None)
        await self.save()


async def follow(responses: ResponseStore, response_id: str, write: Write, *, owner: str, after: int) -> None:
    """Write the events of a stored response with a sequence number above `after`, until its last one.

    A response that was not made in the background has no stored events: those that make it are told in one go.
    """
    deadline: float | None = None
    position = after + 1
    while (stored := await asyncio.to_thread(responses.get, response_id, owner=owner)) is not None:
        frames = await asyncio.to_thread(responses.events, response_id, position)
        for each in frames:
            write(each)
            await write.drain()
        position += len(frames)
        if frames and is_last(frames[-1]):
            return None
        response = msgspec.json.decode(stored.body, type=ResponseBody)
        if response.status not in ("queued", "in_progress") and not frames:
            deadline = time.monotonic() + WAIT_FOR_END if deadline is None else deadline
            if not response.background or time.monotonic() > deadline:
                is_begun = bool(await asyncio.to_thread(responses.events, response_id, 0))
                return await _tell_rest(response, write, position=position, is_begun=is_begun)
        await asyncio.sleep(SAVE_INTERVAL)
    return None


async def _tell_rest(response: ResponseBody, write: Write, *, position: int, is_begun: bool) -> None:
    """Write the events that make the whole response, or the last one alone if others have been stored (`is_begun`)."""
    events = [last_event(response, position)] if is_begun else list(replay(response))[position:]
    for event in events:
        write(frame(event))
        await write.drain()
