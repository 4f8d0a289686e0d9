"""POST /v1/chat/completions: a conversation in, n answers out."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.output import RequestGroup
from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput
from jaxserve.server import generation
from jaxserve.server.body import json_response, read_json
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Delta,
    check_chat_request,
)
from jaxserve.server.protocol.common import sampling_params
from jaxserve.server.protocol.usage import Usage
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.streaming import EventStream, event, while_wanted
from jaxserve.server.template import render_chat


async def create(request: Request) -> Response:
    """Answer the conversation n times."""
    state = server_state(request.scope)
    body = await read_json(request, ChatRequest)
    state.check_model(body.model)
    size = len(await request.body())
    chat = _Chat(state, body, await generation.prepare(lambda: _prepare(state, body), size=size))
    if body.stream:
        return EventStream(chat.events(), stopping=state.stopping)
    answer = await while_wanted(chat.answer(), receive=request.receive, stopping=state.stopping)
    return json_response(answer)


def _prepare(state: ServerState, body: ChatRequest) -> RequestGroup:
    """The conversation, templated, tokenized and validated. Raises InvalidRequest."""
    check_chat_request(body)
    defaults = state.frontend.default_sampling
    params = sampling_params(
        body,
        defaults,
        max_tokens=defaults.get("max_tokens") if body.output_limit is None else body.output_limit,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    try:
        text = render_chat(state, body)
        if body.truncate_prompt_tokens is None:
            generation.check_text_length(text, state)
        return state.frontend.prepare(
            state.frontend.tokenizer.encode(text, add_special_tokens=False),
            params,
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_text=text,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            shorten_output=body.output_limit is None,
        )
    except InvalidRequest as error:
        if error.param == "prompt":  # the front end knows no messages
            error.param = "messages"
        raise


class _Chat:
    """One request on its way back."""

    def __init__(self, state: ServerState, body: ChatRequest, group: RequestGroup):
        self._state = state
        self._body = body
        self._group = group
        self._created = int(time.time())
        self._usage = generation.UsageCounter([group])

    async def answer(self) -> ChatResponse:
        """Everything at once."""
        async with contextlib.aclosing(generation.run(self._state, [self._group])) as deltas:
            async for prompt_index, delta in deltas:
                self._usage.count(prompt_index, delta)
        result = self._group.result()
        response = ChatResponse(
            id=self._group.request_id,
            created=self._created,
            model=self._state.model,
            choices=[self._choice(output) for output in result.outputs],
            usage=self._usage.total(),
        )
        if self._body.prompt_logprobs is not None:
            response.prompt_logprobs = result.prompt_logprobs or []
        if self._body.return_token_ids:
            response.prompt_token_ids = result.prompt_token_ids
        return response

    async def events(self) -> AsyncGenerator[bytes]:
        """Piece by piece, as server-sent events. A choice's first chunk has its role."""
        options = self._body.stream_options
        begun: set[int] = set()
        async with contextlib.aclosing(generation.run(self._state, [self._group])) as deltas:
            async for prompt_index, delta in deltas:
                self._usage.count(prompt_index, delta)
                usage = self._usage.in_chunk(options)
                for output in delta.outputs:
                    if output.index not in begun:
                        begun.add(output.index)
                        yield event(self._first_chunk(output.index, usage=usage))
                    choice = self._chunk_choice(output)
                    if _has_news(choice):
                        yield event(self._chunk([choice], usage=usage))
        if options is not None and options.include_usage:
            yield event(self._chunk([], usage=self._usage.total()))

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=AssistantMessage(content=output.text),
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else UNSET,
        )

    def _chunk_choice(self, output: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=output.index,
            delta=Delta(content=output.text or UNSET),
            logprobs=self._logprobs(output) if output.token_ids else None,
            finish_reason=output.finish_reason,
            stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if self._body.num_logprobs is None:
            return None
        tokenizer = self._state.frontend.tokenizer
        return chat_logprobs(tokenizer, output.token_ids, output.logprobs or [], num_top=self._body.num_logprobs)

    def _first_chunk(self, index: int, *, usage: Usage | UnsetType | None) -> ChatChunk:
        chunk = self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))], usage=usage)
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._group.prompt_token_ids
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice], *, usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._group.request_id, created=self._created, model=self._state.model, choices=choices, usage=usage
        )


def _has_news(choice: ChatChunkChoice) -> bool:
    """Whether a chunk is worth sending: a token that only holds text back is not."""
    return bool(choice.delta.content or choice.finish_reason or choice.logprobs or choice.token_ids)
