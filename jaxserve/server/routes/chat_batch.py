"""POST /v1/chat/completions/batch: conversations in, an answer to each of them out, as vLLM has it."""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.generation.chat import Chat
from jaxserve.server.generation.reading import unique
from jaxserve.server.protocol.chat import ChatBatchRequest, ChatRequest, ChatResponse
from jaxserve.server.protocol.common import MAX_CHOICES, not_supported, rename
from jaxserve.server.protocol.usage import total_usage
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import json_response
from jaxserve.server.wire.streaming import while_wanted


async def create(request: Request) -> Response:
    """Answer each conversation once. Choice k is the answer to conversation k."""
    state = server_state(request.scope)
    body = await state.reader.request(request, ChatBatchRequest)
    _check(body)
    answer_id = f"chatcmpl-{body.request_id or request.scope['request_id']}"
    fields = msgspec.structs.asdict(body)
    chats = []
    for index, messages in enumerate(body.messages):
        single = ChatRequest(**{**fields, "messages": messages})
        try:
            group = await state.chats.prepare(single, request, request_id=f"{unique(answer_id)}-{index}")
        except InvalidRequest as error:
            rename(error, "messages", f"messages[{index}]")
            raise
        chats.append(Chat(state.chats, single, group, answer_id=answer_id))
    answers = await while_wanted(_answers(chats), receive=request.receive, stopping=state.life.stopping)
    first = answers[0]
    first.choices = [choice for answer in answers for choice in answer.choices]
    for index, (choice, answer) in enumerate(zip(first.choices, answers, strict=True)):
        choice.index = index
        choice.prompt_token_ids = UNSET if answer.prompt_token_ids is None else answer.prompt_token_ids
    first.prompt_token_ids = None  # each choice has those of its conversation
    first.usage = total_usage([answer.usage for answer in answers])
    return json_response(first)


def _check(body: ChatBatchRequest) -> None:
    """Raise InvalidRequest, naming the field, for what a batch has not."""
    if not 1 <= len(body.messages) <= MAX_CHOICES:
        raise InvalidRequest(
            f"messages must have 1 to {MAX_CHOICES} conversations, got {len(body.messages)}", param="messages"
        )
    if body.stream:
        raise not_supported("stream", "a stream of several conversations")
    if body.n not in (None, 1):
        raise not_supported("n", "more than one answer to each of several conversations")
    for name in ("tools", "prompt_logprobs"):
        if getattr(body, name) not in (None, []):
            raise not_supported(name, f"{name} with several conversations")


async def _answers(chats: Sequence[Chat]) -> list[ChatResponse]:
    """Return the answers. If one fails, so do all."""
    tasks = [asyncio.create_task(each.answer()) for each in chats]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
