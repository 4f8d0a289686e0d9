"""RequestStream: the asyncio side of the front end, from the engine's thread to one consumer per request.

The engine calls the sink once a step; one `call_soon_threadsafe` brings the step's outputs into the event loop, where
they wait for their consumers. Detokenizing happens when a consumer asks, and takes all that has come since.
"""

import asyncio
from types import TracebackType

from jaxserve.engine.client import EngineClient
from jaxserve.engine.output import RequestGroup
from jaxserve.errors import EngineDead, RequestFailed
from jaxserve.request import EngineOutput, RequestOutput

_ALIVE_CHECK_SECONDS = 1.0


class RequestStream:
    """Asynchronous iterator of what is new for one prompt (RequestOutput deltas), until all its sequences finish.

    Leaving it early aborts the request in the engine: by `aclose`, by the end of an `async with`, or by cancelling the
    task that waits for the next delta. Iteration raises RequestFailed when the engine could not finish a sequence, and
    EngineDead when it has died; what came before is shown first.
    """

    def __init__(self, group: RequestGroup, client: EngineClient, dispatcher: "Dispatcher"):
        self.group = group
        self._client = client
        self._dispatcher = dispatcher
        self._pending: list[EngineOutput] = []
        self._wakeup = asyncio.Event()
        self._is_dead = False
        self._is_closed = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._is_closed:
            if self._pending:
                if stopped := self.group.push(self._take_pending()):
                    self._client.abort(stopped)
                if self.group.error is not None:
                    self._close()
                    error = RequestFailed if self._client.is_alive() else EngineDead
                    raise error(self.group.error)
                if self.group.is_finished:
                    self._close()
                if (delta := self.group.take_delta()) is not None:
                    return delta
            elif self._is_dead:
                self._close()
                raise EngineDead("the engine has died")
            else:
                await self._wait()
        raise StopAsyncIteration

    def _take_pending(self) -> list[EngineOutput]:
        """What has come, but not beyond a failure: what came before it is shown first."""
        errors = (index for index, output in enumerate(self._pending) if output.finish_reason == "error")
        end = next(errors, len(self._pending)) or 1
        outputs, self._pending = self._pending[:end], self._pending[end:]
        return outputs

    async def _wait(self) -> None:
        self._wakeup.clear()
        try:
            await self._wakeup.wait()
        except asyncio.CancelledError:
            self._close()
            raise

    async def result(self) -> RequestOutput:
        """Wait for the end and return everything. Raises as iteration does."""
        async with self:
            async for _ in self:
                pass
        return self.group.result()

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent; iteration ends."""
        self._close()

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wakeup.set()
        self._dispatcher.remove(self)
        if unfinished := self.group.unfinished_ids:
            self._client.abort(unfinished)

    def deliver(self, output: EngineOutput) -> None:
        """Take an output from the dispatcher."""
        self._pending.append(output)
        self._wakeup.set()

    def engine_died(self) -> None:
        """Let the consumer know that nothing more will come."""
        self._is_dead = True
        self._wakeup.set()


class Dispatcher:
    """The sink of all streams of one event loop."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._client = client
        self._streams: dict[str, RequestStream] = {}
        self._alive_check: asyncio.TimerHandle | None = None

    def submit(self, group: RequestGroup) -> RequestStream:
        """Start a prompt. Raises what `EngineClient.submit` raises."""
        stream = RequestStream(group, self._client, self)
        for request in group.requests:  # before submitting: the first output may come at once
            self._streams[request.request_id] = stream
        try:
            self._client.submit(group.requests, self.sink)
        except BaseException:
            self.remove(stream)
            raise
        if self._alive_check is None:
            self._alive_check = self.loop.call_later(_ALIVE_CHECK_SECONDS, self._check_alive)
        return stream

    def remove(self, stream: RequestStream) -> None:
        """Forget a stream; outputs that still come for it are dropped."""
        for request in stream.group.requests:
            self._streams.pop(request.request_id, None)

    def sink(self, outputs: list[EngineOutput]) -> None:
        """Called on the engine's thread, once a step."""
        try:
            self.loop.call_soon_threadsafe(self._deliver, outputs)
        except RuntimeError:  # the loop is closed, and with it every consumer
            self._client.abort([output.request_id for output in outputs])

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)

    def _check_alive(self) -> None:
        """An engine in another process can die without a word: look, as long as someone waits."""
        self._alive_check = None
        if not self._streams:
            return
        if self._client.is_alive():
            self._alive_check = self.loop.call_later(_ALIVE_CHECK_SECONDS, self._check_alive)
            return
        for stream in list(self._streams.values()):
            stream.engine_died()
