"""Snapshots of the engine for monitoring: one at a time, the same for all requests, and none without requests."""

import asyncio
import time

import msgspec

from jaxserve.engine.client import EngineClient, EngineSnapshot

MAX_AGE = 0.1
"""Seconds for which a snapshot is reused."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, and the sizes needed to interpret it. `time` is in seconds, with an arbitrary origin."""

    time: float
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    snapshot: EngineSnapshot


class EngineView:
    """Takes snapshots of one engine, in a thread, because they wait for the engine's step."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._taking: asyncio.Task[EngineState] | None = None
        self._taken: EngineState | None = None

    async def state(self) -> EngineState:
        """Return a state not older than MAX_AGE. Raises EngineDead."""
        if self._taken is not None and time.monotonic() - self._taken.time < MAX_AGE:
            return self._taken
        if self._taking is None:
            self._taking = asyncio.create_task(self._take())
            self._taking.add_done_callback(self._forget)
        return await asyncio.shield(self._taking)  # others may wait for it too

    async def _take(self) -> EngineState:
        snapshot = await asyncio.to_thread(self._client.snapshot)
        info = self._client.info
        self._taken = EngineState(
            time=time.monotonic(),
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            snapshot=snapshot,
        )
        return self._taken

    def _forget(self, task: asyncio.Task[EngineState]) -> None:
        self._taking = None
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, in case nobody waits any more
