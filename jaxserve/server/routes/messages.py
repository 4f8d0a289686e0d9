"""POST /v1/messages: a conversation in the shapes of Anthropic's API, answered by the same engine as a chat."""

import functools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.server.anthropic.context import Edit, edited, edits_of
from jaxserve.server.anthropic.conversation import chat_request, ignored, name_as_sent
from jaxserve.server.anthropic.protocol import (
    AppliedEdit,
    AppliedEdits,
    CountRequest,
    Message,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    OriginalCount,
    TokenCount,
)
from jaxserve.server.anthropic.writer import Event, MessageWriter, frame
from jaxserve.server.generation.chat import Chat
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.generation.template import render_chat
from jaxserve.server.protocol.chat import ChatChunkChoice, ChatRequest, check_chat_request
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.wire import errors
from jaxserve.server.wire.body import json_response
from jaxserve.server.wire.streaming import EventStream, Write, while_wanted


async def create(request: Request) -> Response:
    """Answer a conversation."""
    state = server_state(request.scope)
    body, chat_body, applied = await _read(state, request, MessagesRequest)
    request_id = f"msg_{uuid.uuid4().hex}"
    try:
        group = await state.chats.prepare(chat_body, request, request_id=request_id)
    except InvalidRequest as error:
        name_as_sent(error, body)
        raise
    usage = MessagesUsage(input_tokens=len(group.prompt_token_ids), output_tokens=0)
    message = MessagesResponse(id=request_id, model=state.model.name, content=[], usage=usage)
    if body.context_management is not None:
        message.context_management = AppliedEdits(applied_edits=applied)
    info = state.model.frontend.client.info
    writer = MessageWriter(
        message,
        shows_thoughts=body.thinking is None or body.thinking.display != "omitted",
        cache_block=info.block_size if info.enable_prefix_caching and _asks_to_cache(body) else None,
    )
    run = functools.partial(_run, body, Chat(state.chats, chat_body, group, answer_id=request_id), writer)
    if body.stream:

        async def tell_failure(error: Exception) -> bytes:
            status = error.status if isinstance(error, JaxserveError) else 500
            failure = errors.encode_error(
                status, errors.error_body(error), path=request.scope["path"], request_id=request.scope["request_id"]
            )
            return b"event: error\ndata: %b\n\n" % failure

        return EventStream(
            run,
            slow_readers=state.slow_readers,
            stopping=state.life.stopping,
            done=b"",
            tell_failure=tell_failure,
        )
    await while_wanted(run(), receive=request.receive, stopping=state.life.stopping)
    return json_response(message)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation, as the model would read them."""
    state = server_state(request.scope)
    body, chat_body, applied = await _read(state, request, CountRequest)
    try:
        check_chat_request(chat_body)
        count = await state.runner.prepare(lambda _: _count(state.model, chat_body), request)
    except InvalidRequest as error:
        name_as_sent(error, body)
        raise
    original = OriginalCount(count + sum(edit.cleared_input_tokens for edit in applied))
    return json_response(TokenCount(count, UNSET if body.context_management is None else original))


def _count(model: ServedModel, body: ChatRequest) -> int:
    text = render_chat(model.frontend.tokenizer, model.message_style, body)
    model.check_text_length(text, may_exceed=True, param="messages")
    return len(model.frontend.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens)))


async def _read[T: CountRequest](
    state: ServerState, request: Request, kind: type[T]
) -> tuple[T, ChatRequest, list[AppliedEdit]]:
    """Return the body with its conversation edited, the equivalent chat, and the edits that have removed something.
    Raises InvalidRequest and ModelNotFound.
    """
    body = await state.reader.struct(request, kind, route="messages")
    try:
        chat = chat_request(body, has_thoughts=state.model.syntax.has_thoughts)
        edits = edits_of(body.context_management).known
        for what in ignored(body):
            state.reader.unknown_fields.ignore(what, route="messages")
        if not edits:
            return body, chat, []
        check_chat_request(chat)
        messages, applied = await state.runner.prepare(lambda _: _edited(state.model, body, edits), request)
        body = msgspec.structs.replace(body, messages=messages)
        return body, chat_request(body, has_thoughts=state.model.syntax.has_thoughts), applied
    except InvalidRequest as error:
        name_as_sent(error, body)
        raise


def _edited(model: ServedModel, body: CountRequest, edits: Sequence[Edit]) -> tuple[list[Message], list[AppliedEdit]]:
    def count(messages: Sequence[Message]) -> int:
        edited_body = msgspec.structs.replace(body, messages=list(messages))
        return _count(model, chat_request(edited_body, has_thoughts=model.syntax.has_thoughts))

    return edited(body.messages, edits, count)


def _asks_to_cache(body: CountRequest) -> bool:
    """Return true if a part of the prompt is marked with `cache_control`."""

    def is_marked(blocks: Any) -> bool:
        return isinstance(blocks, list) and any(
            block.get("cache_control") is not None or is_marked(block.get("content"))
            for block in blocks
            if isinstance(block, dict)
        )

    return (
        body.cache_control is not None
        or any(tool.cache_control is not None for tool in body.tools or ())
        or is_marked(body.system)
        or any(is_marked(message.content) for message in body.messages)
    )


async def _run(body: MessagesRequest, chat: Chat, writer: MessageWriter, write: Write | None = None) -> None:
    """Run the request and `write` its events in order."""
    is_begun = False

    def tell(events: Iterable[Event]) -> None:
        for event in events:
            if write is not None:
                write(frame(event))

    def take(choice: ChatChunkChoice) -> None:
        nonlocal is_begun
        if not is_begun:  # the engine's refusal comes before any event
            is_begun = True
            tell(writer.start(chat.usage.total()))
        tell(writer.take(choice))

    try:
        await chat.run(take)
    except InvalidRequest as error:
        name_as_sent(error, body)
        raise
    tell(writer.finish(chat.usage.total()))
