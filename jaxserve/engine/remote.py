"""The client of an engine in another process, used by API workers. No jax here.

Messages are read in the event loop that `connect` ran in, so that a step's outputs reach their streams without changing
threads; `process` is the other side.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import math
import pathlib
import threading
from collections.abc import Callable
from typing import Any, Self, override

import msgspec
import zmq
import zmq.asyncio

from jaxserve.engine import wire
from jaxserve.engine.client import EngineClient, EngineInfo, EngineSnapshot, EngineStats, OutputSink
from jaxserve.errors import EngineDead, InvalidRequest, Unavailable
from jaxserve.request import EngineOutput, EngineRequest

logger = logging.getLogger(__name__)

SILENCE_LIMIT = 30.0
"""Seconds without a word (the engine's process sends its stats every second at least) after which it counts as dead.
Only time in which this process runs is counted: while it is paused, or its machine is, it cannot hear anything.
"""

CALL_TIMEOUT = 60.0
"""Seconds to wait for the answer to one of the rare calls, counted likewise."""

TICK = 1.0
"""Seconds in which time is counted. A tick that takes longer counts as one: this process was held up, not the engine,
whose words of that time have yet to be read.
"""


class RemoteEngineClient(EngineClient):
    """One of the clients of an engine process. Request ids must not be reused.

    `submit` and `abort` are thread-safe, but cheapest in the event loop; calls that wait for an answer must come from
    another thread. Sinks are called in the event loop.

    Attributes:
        on_placed: called in the event loop with the chunks of prompts that other clients have sent, see `wire.Submit`.
        num_others: requests of other clients that have not ended, as last heard.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        """Use `connect`."""
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._context = zmq.asyncio.Context()
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.set_hwm(0)  # data in transit is bounded by the max_tokens of its requests
        self._incoming.bind(wire.client_address(folder, name))
        self._outgoing = self._context.socket(zmq.PUSH)
        self._outgoing.set_hwm(0)
        self._outgoing.connect(wire.engine_address(folder))
        self._sinks: dict[str, OutputSink] = {}
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._stats = EngineStats()
        self._silence = 0.0
        self._death: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.on_placed: Callable[[list[list[bytes]]], None] | None = None
        self.num_others = 0

    @classmethod
    async def connect(cls, folder: pathlib.Path, name: str) -> Self:
        """Wait until the engine that reads in `folder` runs. `name` must be new to it. Cancel to give up."""
        client = cls(folder, name)
        client._send(wire.encode(wire.Hello(name)))
        try:
            while not isinstance(message := wire.decode_to_client(await client._incoming.recv()), wire.Welcome):
                pass
        except BaseException:
            client.close()
            raise
        client.info = message.info
        client._tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._count_silence())]
        return client

    info: EngineInfo

    @override
    def submit(
        self, requests: list[EngineRequest], sink: OutputSink, *, chunks: list[list[bytes]] | None = None
    ) -> None:
        """Queue sequences; other clients of the engine learn the `chunks` of their prompts."""
        self._raise_if_dead()
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or not self._sinks.keys().isdisjoint(ids):
            raise InvalidRequest("a request with this id is running already", param="request_id")
        message = wire.encode(wire.Submit(self._name, requests, chunks or []))
        self._sinks.update(dict.fromkeys(ids, sink))
        self._send(message)

    @override
    def abort(self, request_ids: list[str]) -> None:
        known = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
        if known and self._death is None:
            self._send(wire.encode(wire.Abort(self._name, known)))

    @override
    def stats(self) -> EngineStats:
        return self._stats

    @override
    def snapshot(self) -> EngineSnapshot:
        return msgspec.convert(self._call("snapshot"), EngineSnapshot)

    @override
    def is_alive(self) -> bool:
        if self._death is None and self._silence > SILENCE_LIMIT:
            self._death = f"nothing has been heard of it for {SILENCE_LIMIT:.0f} s"
        return self._death is None

    @override
    def reset_prefix_cache(self) -> bool:
        return self._call("reset_prefix_cache")

    @override
    def start_profile(self, directory: str) -> None:
        self._call("start_profile", directory)

    @override
    def stop_profile(self) -> None:
        self._call("stop_profile")

    @property
    def num_unfinished(self) -> int:
        """Requests of this client that have not ended."""
        return len(self._sinks)

    def engine_died(self, reason: str) -> None:
        """Notify everyone who waits for the engine that its process has ended. Call it in the event loop."""
        if self._death is None:
            self._death = reason
        message = f"the engine has stopped: {reason}"
        self._deliver([EngineOutput(request_id=i, finish_reason="error", error=message) for i in self._sinks])
        self._end_calls(message)

    @override
    def close(self) -> None:
        """Disconnect from the engine, which goes on. Call it in the event loop."""
        if not self._context.closed:
            self._death = self._death or "the connection is closed"
            self._end_calls(self._death)  # a thread that waits for an answer would hold up the end of the process
            for task in self._tasks:
                task.cancel()
            self._context.destroy(linger=0)

    def _raise_if_dead(self) -> None:
        if not self.is_alive():
            raise EngineDead(f"the engine has stopped: {self._death}")

    def _send(self, message: bytes) -> None:
        if threading.get_ident() == self._thread:
            self._outgoing.send(message)
        else:
            self._loop.call_soon_threadsafe(self._outgoing.send, message)

    def _call(self, method: wire.Method, *arguments: str) -> Any:
        assert threading.get_ident() != self._thread, "the answer comes through the event loop: wait in a thread"
        self._raise_if_dead()
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def send() -> None:
            if self._context.closed:  # closed since the call was scheduled
                answer.set_exception(EngineDead("the connection is closed"))
                return
            number = len(self._calls) and max(self._calls) + 1
            self._calls[number] = answer
            self._send(wire.encode(wire.Call(self._name, number, method, list(arguments))))

        self._loop.call_soon_threadsafe(send)
        for _ in range(math.ceil(CALL_TIMEOUT / TICK)):
            with contextlib.suppress(TimeoutError):
                return answer.result(timeout=TICK)
        raise Unavailable(f"the engine has been in a step for {CALL_TIMEOUT:.0f} s")

    def _end_calls(self, message: str) -> None:
        for call in self._calls.values():
            call.set_exception(EngineDead(message))
        self._calls.clear()

    async def _read(self) -> None:
        """Handle the engine's messages, until the end."""
        while True:
            message = wire.decode_to_client(await self._incoming.recv())
            self._silence = 0.0
            match message:
                case wire.Outputs(outputs):
                    self._deliver(outputs if self._death is None else list(map(self._with_failure, outputs)))
                case wire.Stats(stats):
                    self._stats = stats
                case wire.Placed(chunks, num_others):
                    self.num_others = num_others
                    if self.on_placed is not None:
                        self.on_placed(chunks)
                case wire.Answer(number, value, refusal):
                    self._answer(number, value, None if refusal is None else refusal.error())
                case wire.Died(reason):
                    self._death = reason  # the outputs that say so follow

    def _with_failure(self, output: EngineOutput) -> EngineOutput:
        """Return an output of an engine that is gone: what it has aborted itself, because it was closed, has failed.

        Otherwise clients would take the beginning of an answer for all of it.
        """
        if output.finish_reason != "abort":
            return output
        return msgspec.structs.replace(output, finish_reason="error", error=f"the engine has stopped: {self._death}")

    async def _count_silence(self) -> None:
        """Add up how long nothing has been heard, until the end."""
        while True:
            await asyncio.sleep(TICK)
            self._silence += TICK

    def _answer(self, number: int, value: Any, error: Exception | None) -> None:
        call = self._calls.pop(number, None)
        if call is None:  # ended by the engine's death
            return
        if error is None:
            call.set_result(value)
        else:
            call.set_exception(error)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Hand outputs to the sinks, a list each; those of aborted requests, still on their way, to none."""
        by_sink: dict[OutputSink, list[EngineOutput]] = collections.defaultdict(list)
        sinks = self._sinks
        for output in outputs:
            sink = sinks.get(output.request_id)
            if sink is not None:
                by_sink[sink].append(output)
                if output.finish_reason is not None:
                    del sinks[output.request_id]
        for sink, batch in by_sink.items():
            try:
                sink(batch)
            except Exception:  # the other requests' callers must not be affected
                logger.exception("a sink has raised; its requests are aborted")
                self.abort([output.request_id for output in batch])
