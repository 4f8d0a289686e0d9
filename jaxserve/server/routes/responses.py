"""/v1/responses: a conversation that the server stores, answered at once, as a stream, or in the background."""

import asyncio
import functools
import logging
import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.decoding import decoded
from jaxserve.errors import InvalidRequest, NotFound
from jaxserve.server.generation.chat import Chat
from jaxserve.server.protocol.messages import MAX_MESSAGES
from jaxserve.server.protocol.responses import (
    DeletedResponse,
    ItemList,
    Reasoning,
    ResponseBody,
    ResponsesRequest,
    TextConfig,
    TextFormat,
    check_responses_request,
)
from jaxserve.server.responses.answer import CANCEL_INTERVAL, Answer, is_running, progress
from jaxserve.server.responses.conversation import (
    Item,
    as_messages,
    chat_request,
    input_items,
    is_reference,
    listed,
    name_as_sent,
)
from jaxserve.server.responses.journal import Relay, follow
from jaxserve.server.responses.store import ResponseStore, StoredResponse
from jaxserve.server.responses.tools import tools_of
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.wire.body import decode, json_response
from jaxserve.server.wire.streaming import EventStream, while_wanted

logger = logging.getLogger(__name__)

WAIT_FOR_CANCEL = 10.0  # seconds
_REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "service_tier")
"""Fields of a request that its response has unchanged."""
_REPEATED_IF_SENT = ("prompt_cache_key", "safety_identifier", "user")
"""Fields that it has if they were sent: OpenAI's specification does not allow them to be null."""


async def create(request: Request) -> Response:
    """Answer a conversation, and store the answer."""
    state = server_state(request.scope)
    body = await state.reader.request(request, ResponsesRequest)
    answer = await _prepare(state, body, request)
    if body.background and body.stream:
        relay = Relay()
        await answer.start_in_background(relay)
        return EventStream(relay.copy, slow_readers=state.slow_readers, stopping=state.life.stopping, done=b"")
    if body.background:
        return await answer.start_in_background()
    if body.stream:
        return EventStream(
            answer.run,
            slow_readers=state.slow_readers,
            stopping=state.life.stopping,
            done=b"",
            tell_failure=answer.fail,
        )
    await while_wanted(answer.run(), receive=request.receive, stopping=state.life.stopping)
    return json_response(answer.response)


async def show(request: Request) -> Response:
    """Return a stored response in its current state, or its events: those that were, and those to come."""
    is_stream = _flag(request, "stream")
    after = _number(request, "starting_after", default=-1, least=0, most=2**31)
    stored = await _find(request)
    if is_stream:
        state, owner = server_state(request.scope), request.scope["owner"]
        tell = functools.partial(
            follow, state.responses.store, request.path_params["response_id"], owner=owner, after=after
        )
        return EventStream(tell, slow_readers=state.slow_readers, stopping=state.life.stopping, done=b"")
    return Response(stored.body, media_type="application/json")


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return value in ("true", "1")


def _number(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) <= 10 and least <= int(value) <= most):
        raise InvalidRequest(f"{name} must be an integer in [{least}, {most}], got {value!r:.40}", param=name)
    return int(value)


async def delete(request: Request) -> Response:
    """Delete a stored response. One that runs in the background is cancelled."""
    state = server_state(request.scope)
    response_id = request.path_params["response_id"]
    if not await asyncio.to_thread(state.responses.store.delete, response_id, owner=request.scope["owner"]):
        raise _not_found(response_id)
    return json_response(DeletedResponse(id=response_id))


async def show_input(request: Request) -> Response:
    """Return a page of the input items of a stored response, the last one first unless `order` is asc."""
    limit = _number(request, "limit", default=20, least=1, most=100)
    order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    stored = await _find(request)
    items: list[Item] = msgspec.json.decode(stored.items)[: stored.num_inputs]
    first = {item.get("id"): index for index, item in reversed(list(enumerate(items)))}
    listed_items = (  # an id that another item has is not shown again
        listed({**item, "id": f"item_{index}"} if first[item.get("id")] != index else item, index)
        for index, item in enumerate(items)
    )
    data = list(listed_items)[:: 1 if order == "asc" else -1]
    ids = [str(item["id"]) for item in data]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after: there is no input item {after[:80]!r}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page, ids = data[start : start + limit], ids[start : start + limit]
    first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
    return json_response(ItemList(data=page, first_id=first_id, last_id=last_id, has_more=start + limit < len(data)))


async def cancel(request: Request) -> Response:
    """Stop a response that runs in the background; return its final state."""
    state = server_state(request.scope)
    stored = await _find(request)
    if not progress(stored).background:
        raise InvalidRequest(
            "only a response that was created with background=true can be cancelled", param="response_id"
        )
    await asyncio.to_thread(state.responses.store.cancel, request.path_params["response_id"])
    deadline = time.monotonic() + WAIT_FOR_CANCEL
    while is_running(progress(stored)) and time.monotonic() < deadline:
        await asyncio.sleep(CANCEL_INTERVAL / 5)
        stored = await _find(request)
    return Response(stored.body, media_type="application/json")


async def _prepare(state: ServerState, body: ResponsesRequest, request: Request) -> Answer:
    """Validate and tokenize the conversation with its earlier turns of the same owner. Raises InvalidRequest."""
    owner, num_stored_bytes = request.scope["owner"], 0
    check_responses_request(body)
    limit = state.model.frontend.client.info.max_logprobs
    if 0 <= limit < (body.top_logprobs or 0):  # also where `include` does not ask for them, and no chat would check it
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs}, at most {limit} are allowed here", param="top_logprobs"
        )
    if body.background and not state.responses.store.is_enabled:
        raise InvalidRequest("background needs stored responses, and this server stores none", param="background")
    earlier: list[Item] = []
    if body.previous_response_id is not None:
        stored = await _find_earlier(state, body.previous_response_id, owner=owner)
        try:
            earlier = await decode(stored.items, lambda body: decoded(body, list), name="the conversation")
        except InvalidRequest as error:
            error.param = "previous_response_id"
            raise
        num_stored_bytes = len(stored.items)
    items = [*earlier, *input_items(body.input)]
    if not items:
        raise InvalidRequest("input must not be empty", param="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(
            f"the conversation has {len(items)} items, at most {MAX_MESSAGES} are allowed", param="input"
        )
    if any(is_reference(item) for item in items):
        items = await asyncio.to_thread(_resolved, state.responses.store, items, num_before=len(earlier), owner=owner)
    response_id = f"resp_{uuid.uuid4().hex}"
    tools = tools_of(body, items, num_before=len(earlier))
    for kind in tools.left_out:
        state.reader.unknown_fields.ignore(f"tools[].type {kind[:40]!r}", route="responses")
    try:
        chat_body = chat_request(body, as_messages(items, num_before=len(earlier)), tools)
        group = await state.chats.prepare(chat_body, request, request_id=response_id, num_stored_bytes=num_stored_bytes)
    except InvalidRequest as error:
        name_as_sent(error, body, tools)
        raise
    response = _new_response(state, body, response_id)
    chat = Chat(state.chats, chat_body, group, answer_id=response_id)
    return Answer(state.responses, body, chat, response, items, tools, owner=owner)


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
    stored = await asyncio.to_thread(state.responses.store.get, response_id, owner=owner)
    if stored is None:
        raise InvalidRequest(
            f"there is no stored response {response_id[:80]!r}",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    status = progress(stored).status
    if status not in ("completed", "incomplete"):
        raise InvalidRequest(f"the previous response is {status}", param="previous_response_id")
    return stored


def _new_response(state: ServerState, body: ResponsesRequest, response_id: str) -> ResponseBody:
    defaults = state.model.frontend.default_sampling
    return ResponseBody(
        **{name: getattr(body, name) for name in _REPEATED},
        **{name: value for name in _REPEATED_IF_SENT if (value := getattr(body, name)) is not None},
        id=response_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        metadata=body.metadata or {},
        model=state.model.name,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or Reasoning(),
        store=body.store is not False and state.responses.store.is_enabled,
        temperature=float(defaults.get("temperature", 1.0) if body.temperature is None else body.temperature),
        text=TextConfig(
            format=(body.text and body.text.format) or TextFormat(type="text"),
            verbosity=body.text and body.text.verbosity,
        ),
        tool_choice=body.tool_choice or "auto",
        tools=[_echoed(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=float(defaults.get("top_p", 1.0) if body.top_p is None else body.top_p),
    )


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as it was sent. Clients expect all fields of a function."""
    absent = dict.fromkeys(("description", "parameters", "strict")) if tool.get("type") == "function" else {}
    return absent | tool


async def _find(request: Request) -> StoredResponse:
    """Return the response in the path. Raises NotFound, also for one of another key."""
    response_id = request.path_params["response_id"]
    responses = server_state(request.scope).responses.store
    stored = await asyncio.to_thread(responses.get, response_id, owner=request.scope["owner"])
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"there is no stored response {response_id[:80]!r}", param="response_id", code="not_found")
