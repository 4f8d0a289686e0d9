"""POST /v1/chat/completions: a conversation in, n answers out."""

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.generation.chat import Chat
from jaxserve.server.generation.reading import unique
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import json_response
from jaxserve.server.wire.streaming import EventStream, while_wanted


async def create(request: Request) -> Response:
    """Answer the conversation n times."""
    state = server_state(request.scope)
    body = await state.reader.request(request, ChatRequest)
    answer_id = f"chatcmpl-{body.request_id or request.scope['request_id']}"
    group = await state.chats.prepare(body, request, request_id=unique(answer_id))
    chat = Chat(state.chats, body, group, answer_id=answer_id)
    if body.stream:
        return EventStream(chat.stream, slow_readers=state.slow_readers, stopping=state.life.stopping)
    answer = await while_wanted(chat.answer(), receive=request.receive, stopping=state.life.stopping)
    return json_response(answer)
