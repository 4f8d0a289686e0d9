"""/v1/responses: a conversation that the server stores, answered at once, as a stream, or in the background."""

import asyncio
import functools
import logging
import sqlite3
import time
import uuid
from collections.abc import Iterator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from jaxserve.errors import InvalidRequest, JaxserveError, NotFound, QueueFull
from jaxserve.server.body import decode, encoded, json_response
from jaxserve.server.errors import error_body
from jaxserve.server.protocol.chat import ChatChunkChoice, ChatFinishReason, TokenLogprob
from jaxserve.server.protocol.common import decode_body
from jaxserve.server.protocol.messages import MAX_MESSAGES
from jaxserve.server.protocol.responses import (
    DeletedResponse,
    ItemList,
    Reasoning,
    ResponseBody,
    ResponseError,
    ResponsesRequest,
    Status,
    TextConfig,
    TextFormat,
    check_responses_request,
    without_logprobs,
)
from jaxserve.server.reading import read_request
from jaxserve.server.responses.conversation import (
    Item,
    as_messages,
    chat_request,
    input_items,
    is_reference,
    listed,
    name_as_sent,
)
from jaxserve.server.responses.relay import Relay
from jaxserve.server.responses.store import ResponseStore, StoredResponse
from jaxserve.server.responses.writer import Event, ResponseWriter, frame
from jaxserve.server.routes.chat import Chat, prepare
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.streaming import EventStream, Write, while_wanted

logger = logging.getLogger(__name__)

MAX_IN_BACKGROUND = 256
"""Maximum number of background responses of a server, whatever its number of API workers."""

CANCEL_INTERVAL = 0.5  # seconds between checks if a background response is still wanted
WAIT_FOR_CANCEL = 10.0  # seconds
STORE_INTERVAL = 1.0  # seconds until storing is retried


async def create(request: Request) -> Response:
    """Answer a conversation, and store the answer."""
    state = server_state(request.scope)
    body = await read_request(state, request, ResponsesRequest)
    size = len(await request.body())
    answer = await _prepare(state, body, owner=request.scope["owner"], size=size, receive=request.receive)
    if body.background and body.stream:
        relay = Relay()
        await answer.start_in_background(relay)
        return EventStream(relay.copy, slow_readers=state.slow_readers, stopping=state.stopping, done=b"")
    if body.background:
        return await answer.start_in_background()
    if body.stream:
        return EventStream(
            answer.stream, slow_readers=state.slow_readers, stopping=state.stopping, done=b"", tell_failure=answer.fail
        )
    await while_wanted(answer.run(), receive=request.receive, stopping=state.stopping)
    return json_response(answer.response)


async def show(request: Request) -> Response:
    """Return a stored response in its current state."""
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest("stored responses cannot be streamed", param="stream", code="unsupported_parameter")
    stored = await _find(request)
    return Response(stored.body, media_type="application/json")


async def delete(request: Request) -> Response:
    """Delete a stored response. One that runs in the background is cancelled."""
    state = server_state(request.scope)
    response_id = request.path_params["response_id"]
    if not await asyncio.to_thread(state.responses.delete, response_id, owner=request.scope["owner"]):
        raise _not_found(response_id)
    return json_response(DeletedResponse(id=response_id))


async def show_input(request: Request) -> Response:
    """Return the input items of a stored response."""
    stored = await _find(request)
    items: list[Item] = msgspec.json.decode(stored.items)[: stored.num_inputs]
    data = [listed(item, index) for index, item in enumerate(items)]
    ids = [str(item["id"]) for item in data]
    return json_response(
        ItemList(data=data, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=False)
    )


async def cancel(request: Request) -> Response:
    """Stop a response that runs in the background; return its final state."""
    state = server_state(request.scope)
    stored = await _find(request)
    if not _progress(stored).background:
        raise InvalidRequest(
            "only a response that was created with background=true can be cancelled", param="response_id"
        )
    await asyncio.to_thread(state.responses.cancel, request.path_params["response_id"])
    deadline = time.monotonic() + WAIT_FOR_CANCEL
    while _is_running(_progress(stored)) and time.monotonic() < deadline:
        await asyncio.sleep(CANCEL_INTERVAL / 5)
        stored = await _find(request)
    return Response(stored.body, media_type="application/json")


async def _prepare(state: ServerState, body: ResponsesRequest, *, owner: str, size: int, receive: Receive) -> "_Answer":
    """Validate and tokenize the conversation with its earlier turns of the same `owner`; the body has `size` bytes.

    Raises InvalidRequest.
    """
    check_responses_request(body)
    if body.background and not state.responses.is_enabled:
        raise InvalidRequest("background needs stored responses, and this server stores none", param="background")
    earlier: list[Item] = []
    if body.previous_response_id is not None:
        stored = await _find_earlier(state, body.previous_response_id, owner=owner)
        try:
            earlier = await decode(stored.items, lambda body: decode_body(body, list), name="the conversation")
        except InvalidRequest as error:
            error.param = "previous_response_id"
            raise
        size += len(stored.items)
    items = [*earlier, *input_items(body.input)]
    if not items:
        raise InvalidRequest("input must not be empty", param="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(
            f"the conversation has {len(items)} items, at most {MAX_MESSAGES} are allowed", param="input"
        )
    if any(is_reference(item) for item in items):
        items = await asyncio.to_thread(_resolved, state.responses, items, num_before=len(earlier), owner=owner)
    response_id = f"resp_{uuid.uuid4().hex}"
    try:
        chat_body = chat_request(body, as_messages(items, num_before=len(earlier)))
        group = await prepare(state, chat_body, request_id=response_id, size=size, receive=receive)
    except InvalidRequest as error:
        name_as_sent(error, body)
        raise
    response = _new_response(state, body, response_id)
    chat = Chat(state, chat_body, group, answer_id=response_id)
    return _Answer(state, body, chat, response, items, owner=owner)


def _resolved(responses: ResponseStore, items: list[Item], *, num_before: int, owner: str) -> list[Item]:
    """Replace references to items of stored answers by these items. Raises NotFound, which names the id.

    The first `num_before` items are of earlier turns. Each answer is read only once.
    """
    found: dict[str, Item] = {}
    resolved = []
    for index, item in enumerate(items):
        if not is_reference(item):
            resolved.append(item)
            continue
        item_id = str(item.get("id", ""))
        if item_id not in found:
            stored = responses.find(item_id, owner=owner)
            if stored is None:
                raise NotFound(
                    f"there is no stored item {item_id[:80]!r}",
                    param=f"input[{index - num_before}].id",
                    code="not_found",
                )
            found |= {str(each["id"]): each for each in msgspec.json.decode(stored.items) if "id" in each}
        resolved.append(found[item_id])
    return resolved


async def _find_earlier(state: ServerState, response_id: str, *, owner: str) -> StoredResponse:
    stored = await asyncio.to_thread(state.responses.get, response_id, owner=owner)
    if stored is None:
        raise InvalidRequest(
            f"there is no stored response {response_id[:80]!r}",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    status = _progress(stored).status
    if status not in ("completed", "incomplete"):
        raise InvalidRequest(f"the previous response is {status}", param="previous_response_id")
    return stored


def _new_response(state: ServerState, body: ResponsesRequest, response_id: str) -> ResponseBody:
    defaults = state.frontend.default_sampling
    return ResponseBody(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=state.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or Reasoning(),
        store=body.store is not False and state.responses.is_enabled,
        temperature=float(defaults.get("temperature", 1.0) if body.temperature is None else body.temperature),
        text=TextConfig(
            format=(body.text and body.text.format) or TextFormat(type="text"),
            verbosity=body.text and body.text.verbosity,
        ),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        service_tier=body.service_tier,
        top_p=float(defaults.get("top_p", 1.0) if body.top_p is None else body.top_p),
    )


class _Answer:
    """The answer to one request."""

    def __init__(
        self,
        state: ServerState,
        body: ResponsesRequest,
        chat: Chat,
        response: ResponseBody,
        items: list[Item],
        *,
        owner: str,
    ):
        self.response = response
        self._body = body
        self._owner = owner
        self._state = state
        self._chat = chat
        self._items = items
        self._writer = ResponseWriter(response)
        self._logprobs: list[TokenLogprob] = []
        self._untold: list[bytes] = []  # events not yet written

    async def stream(self, write: Write) -> None:
        """Stream the answer as server-sent events."""
        await self.run(write)

    async def fail(self, error: Exception) -> bytes:
        """Mark the answer as failed and store that; return the events that have not been written yet."""
        frames = [*self._untold, *(frame(event) for event in self._writer.fail(_failure(error)))]
        await self._save()
        return b"".join([*frames, frame(self._writer.end())])

    async def start_in_background(self, relay: Relay | None = None) -> Response:
        """Start a background response, and return its initial state; `relay` receives its events. Raises QueueFull."""
        limit = min(MAX_IN_BACKGROUND, self._state.responses.max_entries)
        is_begun = asyncio.get_running_loop().create_future()
        answer = json_response(self.response)
        if len(self._state.background) < limit:
            task = asyncio.create_task(self._run_in_background(is_begun, limit, relay))
            self._state.background.add(task)  # before the first await: a burst must not exceed the limit
            task.add_done_callback(self._state.background.discard)
        else:
            is_begun.set_result(False)
        if not await is_begun:
            raise QueueFull(f"{limit} responses are running in the background")
        return answer

    async def _begin(self, is_begun: asyncio.Future[bool], limit: int) -> bool:
        """Store the incomplete answer unless `limit` are running already; set the result of `is_begun` accordingly."""
        responses, response_id = self._state.responses, self.response.id
        begin = functools.partial(responses.begin, owner=self._owner, max_incomplete=limit)
        try:
            has_room = await asyncio.to_thread(begin, response_id, self._stored())
        except Exception as error:
            if not is_begun.cancelled():
                is_begun.set_exception(error)
            return False
        if is_begun.cancelled():  # the client has gone, and nobody knows the answer's id
            await asyncio.to_thread(responses.delete, response_id, owner=self._owner)
            return False
        is_begun.set_result(has_room)
        return has_room

    async def _run_in_background(self, is_begun: asyncio.Future[bool], limit: int, relay: Relay | None) -> None:
        """Run the answer, if the limit allows one more."""
        with self._state.counted():
            if not await self._begin(is_begun, limit):
                return
            try:
                await while_wanted(self.run(relay), receive=self._unwanted, stopping=self._state.stopping)
            except ClientDisconnect:
                told = b"".join(frame(event) for event in self._writer.cancel())
                await self._save()
                if relay is not None:
                    relay(told + frame(self._writer.end()))
            except Exception as error:
                if not isinstance(error, JaxserveError):
                    logger.exception("a response in the background failed")
                told = await self.fail(error)
                if relay is not None:
                    relay(told)
            finally:
                if relay is not None:
                    relay.end()

    async def _unwanted(self) -> Message:
        """Act as the `receive` of a response without a connection, which disconnects when it is cancelled."""
        while not await asyncio.to_thread(self._state.responses.is_cancelled, self.response.id):
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
            name_as_sent(error, self._body)
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
        if piece.logprobs is not None and not (delta.reasoning or delta.tool_calls):
            self._logprobs += piece.logprobs.content  # a token whose text is held back has them too
        if delta.content or (piece.finish_reason and self._logprobs and writer.is_speaking):
            yield from writer.text(delta.content or "", self._logprobs)
            self._logprobs = []
        for call in delta.tool_calls or ():
            yield from writer.call(
                call.index,
                call_id=call.id or None,
                name=call.function.name or None,
                arguments=call.function.arguments or "",
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
        put = functools.partial(self._state.responses.put, owner=self._owner)
        try:
            await asyncio.to_thread(put, self.response.id, self._stored())
        except sqlite3.Error as error:
            logger.warning("the response %s could not be stored: %s", self.response.id, error)
            self.response.store = False

    async def _replace(self) -> None:
        """Store the current state of a background answer; the final one is retried until that succeeds or the server
        stops.
        """
        is_complete, stored = not _is_running(self.response), self._stored()
        replace = functools.partial(self._state.responses.replace, is_complete=is_complete)
        while True:
            try:
                return await asyncio.to_thread(replace, self.response.id, stored)
            except sqlite3.Error as error:
                logger.warning("the response %s could not be stored: %s", self.response.id, error)
            if not is_complete or self._state.stopping.is_set():
                return None
            await asyncio.sleep(STORE_INTERVAL)

    def _stored(self) -> StoredResponse:
        return StoredResponse(
            body=b"".join(encoded(self.response)),
            items=msgspec.json.encode([*self._items, *map(without_logprobs, self.response.output)]),
            num_inputs=len(self._items),
            item_ids=tuple(item.id for item in self.response.output),
        )


def fail_abandoned(responses: ResponseStore) -> None:
    """Mark background responses of a worker that was killed as failed; called by its successor."""
    for response_id, stored in responses.incomplete().items():
        response = msgspec.json.decode(stored.body, type=ResponseBody)
        for _ in ResponseWriter(response).fail(ResponseError("server_error", "the server's process has ended")):
            pass
        responses.replace(response_id, stored._replace(body=msgspec.json.encode(response)))


class _Progress(msgspec.Struct):
    """The fields of a stored response that are read without the rest, which may have many log probabilities."""

    status: Status
    background: bool


def _progress(stored: StoredResponse) -> _Progress:
    return msgspec.json.decode(stored.body, type=_Progress)


def _is_running(response: ResponseBody | _Progress) -> bool:
    return response.status in ("queued", "in_progress")


async def _find(request: Request) -> StoredResponse:
    """Return the response in the path. Raises NotFound, also for one of another key."""
    response_id = request.path_params["response_id"]
    responses = server_state(request.scope).responses
    stored = await asyncio.to_thread(responses.get, response_id, owner=request.scope["owner"])
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"there is no stored response {response_id[:80]!r}", param="response_id", code="not_found")


def _failure(error: Exception) -> ResponseError:
    detail = error_body(error).error
    return ResponseError(code="server_error", message=detail.message)
