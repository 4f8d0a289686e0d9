"""One answer of /v1/responses on its way: at once, as a stream, or in the background, and into the store."""

import asyncio
import dataclasses
import functools
import itertools
import logging
import sqlite3
from collections.abc import Iterator

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message

from jaxserve.answers.message import ChatFinishReason
from jaxserve.errors import InvalidRequest, JaxserveError, QueueFull
from jaxserve.server.generation.chat import Chat
from jaxserve.server.protocol.chat import ChatChunkChoice, TokenLogprob
from jaxserve.server.protocol.items import Item
from jaxserve.server.protocol.responses import ResponseBody, ResponseError, ResponsesRequest, Status, without_logprobs
from jaxserve.server.responses.conversation import name_as_sent
from jaxserve.server.responses.journal import Journal, Relay
from jaxserve.server.responses.store import ResponseStore, StoredResponse
from jaxserve.server.responses.tools import Tools
from jaxserve.server.responses.writer import Event, ResponseWriter, frame
from jaxserve.server.wire.body import encoded, json_response
from jaxserve.server.wire.errors import error_body
from jaxserve.server.wire.life import Life
from jaxserve.server.wire.streaming import Write, while_wanted

logger = logging.getLogger(__name__)

MAX_IN_BACKGROUND = 256
"""Maximum number of background responses of a server, whatever its number of API workers."""

CANCEL_INTERVAL = 0.5  # seconds between checks if a background response is still wanted
STORE_INTERVAL = 1.0  # seconds until storing is retried


@dataclasses.dataclass(kw_only=True, frozen=True)
class Responses:
    """The responses of a server: stored ones, and those that run without a connection."""

    store: ResponseStore
    life: Life
    background: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)


class Answer:
    """The answer to one request."""

    def __init__(
        self,
        responses: Responses,
        body: ResponsesRequest,
        chat: Chat,
        response: ResponseBody,
        items: list[Item],
        tools: Tools,
        *,
        owner: str,
    ):
        self.response = response
        self._body = body
        self._owner = owner
        self._responses = responses
        self._store = responses.store
        self._chat = chat
        self._items = items
        self._tools = tools
        self._writer = ResponseWriter(
            response, names={name: (tool.name, tool.namespace) for name, tool in tools.by_name.items()}
        )
        self._logprobs: list[TokenLogprob] = []
        self._untold: list[bytes] = []  # events not yet written

    async def fail(self, error: Exception) -> bytes:
        """Mark the answer as failed and store that; return the events that have not been written yet."""
        frames = [*self._untold, *(frame(event) for event in self._writer.fail(_failure(error)))]
        await self._save()
        return b"".join([*frames, frame(self._writer.end())])

    async def start_in_background(self, relay: Relay | None = None) -> Response:
        """Start a background response, and return its initial state; `relay` receives its events. Raises QueueFull."""
        limit = min(MAX_IN_BACKGROUND, self._store.max_entries)
        is_begun = asyncio.get_running_loop().create_future()
        answer = json_response(self.response)
        if len(self._responses.background) < limit:
            task = asyncio.create_task(self._run_in_background(is_begun, limit, relay))
            self._responses.background.add(task)  # before the first await: a burst must not exceed the limit
            task.add_done_callback(self._responses.background.discard)
        else:
            is_begun.set_result(False)
        if not await is_begun:
            raise QueueFull(f"{limit} responses are running in the background")
        return answer

    async def _begin(self, is_begun: asyncio.Future[bool], limit: int) -> bool:
        """Store the incomplete answer unless `limit` are running already; set the result of `is_begun` accordingly."""
        store, response_id = self._store, self.response.id
        begin = functools.partial(store.begin, owner=self._owner, max_incomplete=limit)
        try:
            has_room = await asyncio.to_thread(begin, response_id, self._stored())
        except Exception as error:
            if not is_begun.cancelled():
                is_begun.set_exception(error)
            return False
        if is_begun.cancelled():  # the client has gone, and nobody knows the answer's id
            await asyncio.to_thread(store.delete, response_id, owner=self._owner)
            return False
        is_begun.set_result(has_room)
        return has_room

    async def _run_in_background(self, is_begun: asyncio.Future[bool], limit: int, relay: Relay | None) -> None:
        """Run the answer, if the limit allows one more."""
        with self._responses.life.counted():
            if not await self._begin(is_begun, limit):
                return
            journal = Journal(self._store, self.response.id, relay)
            saving = asyncio.create_task(journal.keep_saving())
            try:
                await while_wanted(self.run(journal), receive=self._unwanted, stopping=self._responses.life.stopping)
            except ClientDisconnect:
                told = b"".join(frame(event) for event in self._writer.cancel())
                await self._save()
                journal(told + frame(self._writer.end()))
            except Exception as error:
                if not isinstance(error, JaxserveError):
                    logger.exception("a response in the background failed")
                journal(await self.fail(error))
            finally:
                saving.cancel()
                await asyncio.gather(saving, return_exceptions=True)
                await journal.end()

    async def _unwanted(self) -> Message:
        """Act as the `receive` of a response without a connection, which disconnects when it is cancelled."""
        while not await asyncio.to_thread(self._store.is_cancelled, self.response.id):
            await asyncio.sleep(CANCEL_INTERVAL)
        return {"type": "http.disconnect"}

    async def run(self, write: Write | None = None) -> None:
        """Run the request and `write` its events in order.

        The answer is stored as soon as it is complete, whether read or not; the final events, which repeat everything
        before, wait for their reader.
        """
        finish_reason: ChatFinishReason | None = None
        saving: asyncio.Task[None] | None = None
        is_begun = False

        def tell(event: Event) -> None:
            if write is not None:
                write(frame(event))

        def take(piece: ChatChunkChoice) -> None:
            nonlocal finish_reason, saving, is_begun
            if not is_begun:  # the engine's refusal comes before any event
                is_begun = True
                for event in self._writer.start():
                    tell(event)
                if self.response.background:
                    saving = asyncio.create_task(self._save())
            for event in self._write(piece):
                tell(event)
            finish_reason = piece.finish_reason or finish_reason

        try:
            await self._chat.run(take)
        except InvalidRequest as error:
            name_as_sent(error, self._body, self._tools)
            raise
        finally:
            if saving is not None:  # it must not overwrite what is stored next
                await saving
        for event in self._writer.finish(finish_reason, self._chat.usage.total()):
            if write is not None:
                self._untold.append(frame(event))
        await self._save()
        while write is not None and self._untold:
            write(self._untold[0])
            del self._untold[0]
            await write.drain()
        tell(self._writer.end())

    def _write(self, piece: ChatChunkChoice) -> Iterator[Event]:
        delta, writer = piece.delta, self._writer
        if delta.reasoning:
            yield from writer.reasoning(delta.reasoning)
        if piece.logprobs is not None:
            self._logprobs += piece.logprobs.content  # a token whose text is held back has them too
        if delta.content or (piece.finish_reason and self._logprobs and writer.is_speaking):
            text, may_follow = delta.content or "", self._chat.has_thoughts and not writer.is_speaking
            yield from writer.text(text, _spoken(self._logprobs, text) if may_follow else self._logprobs)
            self._logprobs = []
        if delta.reasoning or delta.tool_calls:
            self._logprobs = []
        for call in delta.tool_calls or ():
            name, given = "", ""
            if call.function:
                name, given = call.function.name, call.function.arguments
            elif call.custom:
                name, given = call.custom.name, call.custom.input
            yield from writer.call(
                call.index, call_id=call.id or None, name=name or None, given=given or "", is_custom=bool(call.custom)
            )

    async def _save(self) -> None:
        """Store the answer, if it is to be stored; a background one has been stored since it began.

        If cancelled, this still waits for the write, which must not overwrite what is stored next.
        """
        if self.response.store:
            saving = asyncio.create_task(self._replace() if self.response.background else self._put())
            try:
                await asyncio.shield(saving)
            finally:
                await saving

    async def _put(self) -> None:
        """Store the answer, or set its `store` to false if that fails, since the client receives it anyway."""
        put = functools.partial(self._store.put, owner=self._owner)
        try:
            await asyncio.to_thread(put, self.response.id, self._stored())
        except sqlite3.Error as error:
            logger.warning("the response %s could not be stored: %s", self.response.id, error)
            self.response.store = False

    async def _replace(self) -> None:
        """Store the current state of a background answer; the final one is retried until that succeeds or the server
        stops.
        """
        is_complete, stored = not is_running(self.response), self._stored()
        replace = functools.partial(self._store.replace, is_complete=is_complete)
        while True:
            try:
                return await asyncio.to_thread(replace, self.response.id, stored)
            except sqlite3.Error as error:
                logger.warning("the response %s could not be stored: %s", self.response.id, error)
            if not is_complete or self._responses.life.stopping.is_set():
                return None
            await asyncio.sleep(STORE_INTERVAL)

    def _stored(self) -> StoredResponse:
        return StoredResponse(
            body=b"".join(encoded(self.response)),
            items=msgspec.json.encode([*self._items, *map(without_logprobs, self.response.output)]),
            num_inputs=len(self._items),
            item_ids=tuple(item.id for item in self.response.output),
        )


def _spoken(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Return the tokens of `text`, the beginning of a message, without those of the thoughts' end before it. All, if it
    begins within a token.
    """
    written = [bytes(each.bytes or ()) for each in logprobs]
    joined = b"".join(written)
    end = joined.rfind(text.lstrip().encode())
    first = len(joined[:end].rstrip())  # white space before the text may be the first token's
    starts = itertools.accumulate(map(len, written), initial=0)
    begun = [index for index, start in enumerate(starts) if first <= start <= end]
    return logprobs[begun[-1] if begun else 0 :]


def fail_abandoned(responses: ResponseStore) -> None:
    """Mark background responses of a worker that was killed as failed; called by its successor."""
    for response_id, stored in responses.incomplete().items():
        response = msgspec.json.decode(stored.body, type=ResponseBody)
        for _ in ResponseWriter(response).fail(ResponseError("server_error", "the server's process has ended")):
            pass
        responses.replace(response_id, stored._replace(body=msgspec.json.encode(response)))


class Progress(msgspec.Struct):
    """The fields of a stored response that are read without the rest, which may have many log probabilities."""

    status: Status
    background: bool


def progress(stored: StoredResponse) -> Progress:
    """Return how far a stored response has come."""
    return msgspec.json.decode(stored.body, type=Progress)


def is_running(response: ResponseBody | Progress) -> bool:
    """Return true if a response is not complete."""
    return response.status in ("queued", "in_progress")


def _failure(error: Exception) -> ResponseError:
    detail = error_body(error).error
    return ResponseError(code="server_error", message=detail.message)
