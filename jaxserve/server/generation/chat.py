"""The answers to a conversation, whole or in pieces: of /v1/chat/completions, /v1/responses and /v1/messages."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from jaxserve.answers.message import Delta
from jaxserve.answers.tools.definitions import callable_tools, custom_names, is_chosen, must_call, offered_tools
from jaxserve.answers.tools.tool import Tool
from jaxserve.answers.writer import AnswerWriter
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.stream import Take
from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.server.generation.beams import beam_params, for_beams, set_beams
from jaxserve.server.generation.grammars import Grammars
from jaxserve.server.generation.logprobs import chat_logprobs, chat_logprobs_in_turns, shown
from jaxserve.server.generation.running import Runner, UsageCounter
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.generation.template import has_thought, may_think, render_chat, thinks_first
from jaxserve.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
    check_chat_request,
    check_continued,
)
from jaxserve.server.protocol.common import rename, sampling_params
from jaxserve.server.protocol.messages import last_content
from jaxserve.server.protocol.structured import arguments_options, blame, structured_outputs
from jaxserve.server.protocol.usage import Usage
from jaxserve.server.wire.body import encoded_in_turns
from jaxserve.server.wire.streaming import TextEvents, Write, event


def grammar_field(model: ServedModel, body: ChatRequest) -> str | None:
    """Return the field that the answer's grammar is made from; None if the answer is unconstrained."""
    if must_call(body.tool_choice):
        return "tools"
    if body.constraint_field is not None:
        return body.constraint_field
    if model.syntax.forcing.follows_strict(callable_tools(body.tools or [], body.tool_choice)):
        return "tools"
    return None if body.thinking_token_budget is None else "thinking_token_budget"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chats:
    """What answers conversations: the model, and what runs it and checks its grammars."""

    model: ServedModel
    runner: Runner
    grammars: Grammars

    async def prepare(
        self, body: ChatRequest, request: Request, *, request_id: str, num_stored_bytes: int = 0
    ) -> RequestGroup:
        """Render, tokenize and validate the conversation that `request` has brought, with what was stored before.

        Raises InvalidRequest, naming fields as they were sent, and QueueFull if it has to wait for too long.
        """
        try:
            check_chat_request(body)
            tools = _callable_tools(self.model, body)
            constraint = structured_outputs(body.response_format, body.structured_outputs)
            answer = None
            if constraint is not None and not must_call(body.tool_choice):
                check_continued(body, constraint)
                answer = await self.grammars.answer(
                    constraint, field=body.constraint_field, is_strict=body.is_strict, receive=request.receive
                )
            written = await self.grammars.with_checked_parameters(
                tools,
                params=_bound_tools(self.model, body, tools, has_constraint=constraint is not None),
                options=arguments_options(body.structured_outputs, is_closed=self.grammars.closes_objects),
                receive=request.receive,
            )
            return await self.runner.prepare(
                lambda _: _prepare(self.model, body, written, answer=answer, request_id=request_id),
                request,
                num_stored_bytes=num_stored_bytes,
            )
        except InvalidRequest as error:
            blame(error, grammar_field(self.model, body))
            rename(error, "prompt", "messages")  # the front end has no messages
            rename(error, "max_tokens", body.token_limit_field)
            if body.top_logprobs is not None:
                rename(error, "logprobs", "top_logprobs")  # the field with the number
            raise


def _bound_tools(
    model: ServedModel, body: ChatRequest, tools: Sequence[Tool], *, has_constraint: bool
) -> dict[str, str]:
    """Return the names of the tools whose parameters are in the answer's grammar, with the fields that have these."""
    is_all = must_call(body.tool_choice) or has_constraint
    if not is_all and not model.syntax.forcing.follows_strict(tools):
        return {}
    params = {
        tool.as_function.name: f"tools[{index}].{'custom.format' if tool.type == 'custom' else 'function.parameters'}"
        for index, tool in enumerate(body.tools or ())
    }
    return {tool.name: params[tool.name] for tool in tools if is_all or tool.is_strict}


def _prepare(
    model: ServedModel, body: ChatRequest, tools: Sequence[Tool], *, answer: str | None, request_id: str
) -> RequestGroup:
    defaults = model.frontend.default_sampling
    params = sampling_params(
        body,
        defaults,
        max_tokens=defaults.get("max_tokens") if body.token_limit is None else body.token_limit,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        vocab_size=model.frontend.client.info.vocab_size,
    )
    if (beams := beam_params(body)) is not None:
        params = for_beams(params)
    text = render_chat(model.frontend.tokenizer, model.message_style, body)
    model.check_text_length(text, may_exceed=body.truncate_prompt_tokens is not None)
    grammar = model.syntax.forcing.grammar(
        tools,
        is_open=thinks_first(model, body, prompt=text),
        must_call=must_call(body.tool_choice),
        is_parallel=_is_parallel(body),
        answer=answer,
        budget=_budget(model, body),
        may_think=may_think(model.frontend.tokenizer, body, prompt=text, syntax=model.syntax),
        continues_message=bool(body.continue_final_message),
    )
    if beams is not None and grammar:
        raise InvalidRequest("use_beam_search follows no grammar, and this answer has one", param="use_beam_search")
    group = model.frontend.prepare(
        text,
        params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=bool(body.add_special_tokens),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        shorten_output=body.token_limit is None,
        grammar=grammar,
        visible_special_tokens=model.syntax.visible_special_tokens(_read_tools(model, body)),
    )
    return set_beams(model.frontend, group, beams)


def _callable_tools(model: ServedModel, body: ChatRequest) -> list[Tool]:
    """Return the tools that the answer may call. Raises InvalidRequest if its calls could not be parsed."""
    tools = callable_tools(body.tools or [], body.tool_choice)
    if tools and not must_call(body.tool_choice) and not model.syntax.knows_tools:
        raise InvalidRequest(
            "it is not known how this model calls tools: start the server with --tool-call-parser, or force a call by "
            "tool_choice",
            param="tools",
            code="unsupported_parameter",
        )
    return tools


def _read_tools(model: ServedModel, body: ChatRequest) -> list[Tool]:
    """Return the tools of which calls are recognized in the answer: those that may not be called, too, as long as it is
    known how the model calls tools.
    """
    if model.syntax.knows_tools:
        return offered_tools(body.tools or [])
    return callable_tools(body.tools or [], body.tool_choice)


def _budget(model: ServedModel, body: ChatRequest) -> int | None:
    """Return the maximum number of thought tokens, None for no limit. Raises InvalidRequest if thoughts could not be
    recognized.
    """
    budget = body.thinking_token_budget
    if budget is not None and not model.syntax.has_thoughts:
        raise InvalidRequest(
            "thinking_token_budget: it is not known how this model writes thoughts: start the server with "
            "--reasoning-parser",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    return None if budget is None or budget >= model.frontend.client.info.max_model_len else budget


def _is_parallel(body: ChatRequest) -> bool:
    return body.parallel_tool_calls is not False and not is_chosen(body.tool_choice)


class Chat:
    """The answer to one request. `usage` counts the tokens so far; `has_thoughts`: it is known how the model thinks."""

    def __init__(self, chats: Chats, body: ChatRequest, group: RequestGroup, *, answer_id: str):
        self._id = answer_id
        self._model = chats.model
        self._runner = chats.runner
        self._body = body
        self._group = group
        self._created = int(time.time())
        self._shown = shown(group.requests[0].params, as_ids=body.return_tokens_as_token_ids)
        self._read_tools = _read_tools(self._model, body)
        callable_names = {tool.name for tool in callable_tools(body.tools or [], body.tool_choice)}
        self._may_call = bool(callable_names)
        self._hidden_tools = {tool.name for tool in self._read_tools} - callable_names
        self._echo = last_content(body.messages) if body.echo else ""
        self._writers: dict[int, AnswerWriter] = {}
        self.has_thoughts = chats.model.syntax.has_thoughts
        self.usage = UsageCounter([group])

    async def answer(self) -> ChatResponse:
        """Return the whole answer."""
        await self._run(self._count)
        result = self._group.result()
        self._group.forget_logprobs()
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._model.fingerprint,
            choices=[await self._choice(output) for output in result.outputs],
            usage=self.usage.total(),
        )
        if self._body.prompt_logprobs is not None:
            response.prompt_logprobs = await encoded_in_turns(result.prompt_logprobs or [])
        if self._body.return_token_ids:
            response.prompt_token_ids = result.prompt_token_ids
        return response

    async def stream(self, write: Write) -> None:
        """Stream the answer as server-sent events."""
        options = self._body.stream_options
        has_only_text = self._shown is None and not self._body.wants_numbers
        texts = TextEvents(
            lambda index, text: self._chunk(
                [ChatChunkChoice(index=index, delta=Delta(content=text))], usage=self.usage.in_chunk(options)
            )
        )

        def take(choice: ChatChunkChoice) -> None:
            delta = choice.delta
            if has_only_text and delta.content and delta == Delta(content=delta.content) and not choice.finish_reason:
                write(texts.event(choice.index, delta.content))  # the usual case
                return
            is_first = choice.delta.role is not UNSET
            usage = self.usage.before_output(options) if is_first else self.usage.in_chunk(options)
            chunk = self._chunk([choice], usage=usage)
            if is_first and self._body.return_token_ids:
                chunk.prompt_token_ids = self._group.prompt_token_ids
            write(event(chunk))

        await self.run(take)
        if options is not None and options.include_usage:
            write(event(self._chunk([], usage=self.usage.total())))

    async def run(self, take: Callable[[ChatChunkChoice], None]) -> None:
        """Run the request; `take` is called with the new part of each choice. A choice's first piece has its role."""
        begun: set[int] = set()

        def take_delta(prompt_index: int, delta: RequestOutput) -> None:
            self._count(prompt_index, delta)
            for choice in (choice for output in delta.outputs for choice in self._chunk_choices(output)):
                has_news = _has_news(choice)
                # If a call is possible, wait until it is clear: a message of calls has null content.
                if choice.index not in begun and (has_news or not self._may_call):
                    begun.add(choice.index)
                    is_call = choice.delta.tool_calls is not UNSET and choice.delta.content is UNSET
                    content = None if is_call and not self._echo else self._echo
                    take(ChatChunkChoice(index=choice.index, delta=Delta(role="assistant", content=content)))
                if has_news:
                    take(choice)
            self._group.forget_logprobs()

        await self._run(take_delta)

    async def _run(self, take: Take) -> None:
        field = grammar_field(self._model, self._body)
        await self._runner.run([self._group], take, grammar_field=field)

    def _count(self, prompt_index: int, delta: RequestOutput) -> None:
        self.usage.count(prompt_index, delta)
        for output in delta.outputs:
            self.usage.reasoning_tokens += self._writer(output.index).num_thoughts(output)

    @functools.cached_property
    def _is_open(self) -> bool:
        return thinks_first(self._model, self._body, prompt=self._group.prompt or "")

    def _writer(self, index: int) -> AnswerWriter:
        if index not in self._writers:
            syntax, is_open = self._model.syntax, self._is_open
            tools = self._read_tools
            reader = syntax.reader(
                tools,
                is_open=is_open,
                is_begun=has_thought(self._body, syntax),
                max_calls=None if _is_parallel(self._body) else 1,
            )
            counter = syntax.reasoning_counter(tools, is_open=is_open)
            custom = custom_names(self._body.tools or [])
            self._writers[index] = AnswerWriter(
                reader, syntax.call_id, counter=counter, custom=custom, hidden_tools=self._hidden_tools
            )
        return self._writers[index]

    async def _choice(self, output: CompletionOutput) -> ChatChoice:
        writer = self._writer(output.index)
        logprobs = None
        if self._shown is not None:
            tokenizer = self._model.frontend.tokenizer
            logprobs = await chat_logprobs_in_turns(tokenizer, output.token_ids, output.logprobs or [], self._shown)
        message = writer.message(output)
        if self._echo:
            message.content = self._echo + (message.content or "")
        if self._body.include_reasoning is False:
            message.reasoning = message.reasoning_content = UNSET
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=logprobs,
            finish_reason=writer.finish_reason(output, is_chosen=is_chosen(self._body.tool_choice)),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else UNSET,
        )

    def _chunk_choices(self, output: CompletionOutput) -> list[ChatChunkChoice]:
        """Return what is new of a choice, in order; the last piece has all that is not text."""
        writer = self._writer(output.index)
        choices = [ChatChunkChoice(index=output.index, delta=delta) for delta in writer.deltas(output)]
        if self._body.include_reasoning is False:
            for choice in choices:
                choice.delta.reasoning = choice.delta.reasoning_content = UNSET
        last = choices[-1]
        if self._shown is not None and output.token_ids:
            tokenizer = self._model.frontend.tokenizer
            last.logprobs = chat_logprobs(tokenizer, output.token_ids, output.logprobs or [], self._shown)
        last.finish_reason = writer.finish_reason(output, is_chosen=is_chosen(self._body.tool_choice))
        last.stop_reason = UNSET if output.stop_reason is None else output.stop_reason
        last.token_ids = output.token_ids if self._body.return_token_ids else UNSET
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], *, usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._model.fingerprint,
            choices=choices,
            usage=usage,
        )


def _has_news(choice: ChatChunkChoice) -> bool:
    """Return true if a chunk is worth sending: one for a token that is held back is not."""
    delta = choice.delta
    has_words = delta.content or delta.reasoning or delta.tool_calls
    return bool(has_words or choice.finish_reason or choice.logprobs or choice.token_ids)
