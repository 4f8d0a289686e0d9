"""POST /v1/completions: texts or token ids in, their continuations out."""

import asyncio
import threading
import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.output import RequestGroup
from jaxserve.engine.stream import Take
from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation.beams import beam_params, for_beams, set_beams
from jaxserve.server.generation.logprobs import Candidates, CompletionLogprobsBuilder, shown
from jaxserve.server.generation.reading import unique
from jaxserve.server.generation.running import Runner, UsageCounter, while_wanted_by_client
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.protocol.common import rename, sampling_params
from jaxserve.server.protocol.completions import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Prompt,
    check_completion_request,
)
from jaxserve.server.protocol.structured import structured_outputs
from jaxserve.server.protocol.usage import Usage
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import encoded_in_turns, json_response
from jaxserve.server.wire.streaming import EventStream, TextEvents, Write, event, large_event, while_wanted


async def create(request: Request) -> Response:
    """Continue each prompt n times."""
    state = server_state(request.scope)
    body = await state.reader.request(request, CompletionRequest)
    constraint = structured_outputs(body.response_format, body.structured_outputs)
    grammar = ""
    if constraint is not None and not body.is_score_only:  # once, for all prompts
        grammar = await state.grammars.answer(
            constraint, field=body.constraint_field, is_strict=body.is_strict, receive=request.receive
        )
    answer_id = f"cmpl-{body.request_id or request.scope['request_id']}"
    request_id = unique(answer_id)
    groups = await state.runner.prepare(lambda gone: _prepare(state.model, body, grammar, gone, request_id), request)
    completion = _Completion(state.model, state.runner, body, groups, answer_id=answer_id)
    if body.stream:
        return EventStream(completion.stream, slow_readers=state.slow_readers, stopping=state.life.stopping)
    answer = await while_wanted(completion.answer(), receive=request.receive, stopping=state.life.stopping)
    return json_response(answer)


def _prepare(
    model: ServedModel, body: CompletionRequest, grammar: str, gone: threading.Event, request_id: str
) -> list[RequestGroup]:
    """Validate and tokenize the prompts, whose answers follow `grammar`.

    Raises InvalidRequest, naming fields as they were sent.
    """
    try:
        return _checked(model, body, grammar, gone, request_id)
    except InvalidRequest as error:
        rename(error, "max_tokens", body.token_limit_field)
        raise


def _checked(
    model: ServedModel, body: CompletionRequest, grammar: str, gone: threading.Event, request_id: str
) -> list[RequestGroup]:
    prompts = body.prompts()
    check_completion_request(body, prompts)
    num_prompt_logprobs = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if body.echo and body.num_logprobs is not None:
        num_prompt_logprobs.append(body.num_logprobs)
    params = sampling_params(
        body,
        model.frontend.default_sampling,
        max_tokens=body.output_limit,
        logprobs=body.logprobs,
        prompt_logprobs=-1 if -1 in num_prompt_logprobs else max(num_prompt_logprobs, default=None),
        vocab_size=model.frontend.client.info.vocab_size,
    )
    if (beams := beam_params(body)) is not None:
        params = for_beams(params)
    groups = []
    for index, prompt in enumerate(while_wanted_by_client(prompts, gone)):
        try:
            group = _prepare_one(model, body, prompt, params, grammar, request_id=f"{request_id}-{index}")
        except InvalidRequest as error:
            if len(prompts) > 1:
                rename(error, "prompt", f"prompt[{index}]")
            raise
        groups.append(set_beams(model.frontend, group, beams))
    return groups


def _prepare_one(
    model: ServedModel,
    body: CompletionRequest,
    prompt: Prompt,
    params: SamplingParams,
    grammar: str,
    *,
    request_id: str,
) -> RequestGroup:
    if isinstance(prompt, str):
        model.check_text_length(prompt, may_exceed=body.truncate_prompt_tokens is not None)
    group = model.frontend.prepare(
        prompt,
        params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=body.add_special_tokens is not False,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        shorten_output=body.token_limit is None,
        grammar=grammar,
    )
    if body.echo and group.prompt is None:
        group.prompt = model.frontend.tokenizer.decode(group.prompt_token_ids, skip_special_tokens=False)
    elif body.echo and body.truncate_prompt_tokens is not None:
        group.prompt = model.frontend.tokenizer.decode(group.prompt_token_ids)
    return group


class _Completion:
    """The answer to one request. Choice k is continuation k % n of prompt k // n."""

    def __init__(
        self,
        model: ServedModel,
        runner: Runner,
        body: CompletionRequest,
        groups: Sequence[RequestGroup],
        *,
        answer_id: str,
    ):
        self._id = answer_id
        self._model = model
        self._runner = runner
        self._body = body
        self._groups = groups
        self._prompts = body.prompts()
        self._created = int(time.time())
        self._usage = UsageCounter(groups, is_score_only=body.is_score_only)

    async def answer(self) -> CompletionResponse:
        """Return the whole answer."""
        await self._run(self._usage.count)
        choices: list[CompletionChoice] = []
        for prompt_index, group in enumerate(self._groups):
            outputs, prompt_logprobs = group.result().outputs, group.prompt_logprobs
            writers = [self._writer(prompt_index, output) for output in outputs]
            group.forget_logprobs()  # freed as they are encoded
            of_group = [await writer.write_in_turns(output) for writer, output in zip(writers, outputs, strict=True)]
            num_top, encoded = self._body.prompt_logprobs, None
            if num_top is not None:
                if num_top not in (-1, group.requests[0].params.prompt_logprobs):
                    prompt_logprobs = [_most_likely(entry, num_top) for entry in prompt_logprobs or ()]
                encoded = await encoded_in_turns(prompt_logprobs or [])
            for choice in of_group:
                choice.prompt_logprobs = encoded
                if choice.prompt_token_ids is UNSET:
                    choice.prompt_token_ids = None
            choices += of_group
        return self._response(choices, usage=self._usage.total())

    async def stream(self, write: Write) -> None:
        """Stream the answer as server-sent events."""
        options = self._body.stream_options
        if self._body.echo and self._body.num_logprobs is not None:
            await self._stream_in_turns(write)
        else:
            await self._stream_at_once(write)
        if options is not None and options.include_usage:
            write(event(self._response([], usage=self._usage.total())))

    async def _stream_at_once(self, write: Write) -> None:
        """Write each piece as soon as it arrives."""
        body = self._body
        options = body.stream_options
        writers: dict[int, _ChoiceWriter] = {}
        has_only_text = body.num_logprobs is None and not (body.wants_numbers or body.is_score_only)
        texts = TextEvents(
            lambda index, text: self._response(
                [CompletionChoice(index=index, text=text)], usage=self._usage.in_chunk(options)
            )
        )

        def take(prompt_index: int, delta: RequestOutput) -> None:
            self._usage.count(prompt_index, delta)
            group = self._groups[prompt_index]
            for output in delta.outputs:
                index = prompt_index * len(group.requests) + output.index
                if index not in writers:
                    writers[index] = self._writer(prompt_index, output)
                elif has_only_text and output.finish_reason is None:  # the usual case
                    if output.text:
                        write(texts.event(index, output.text))
                    continue
                choice = writers[index].write(output)
                if _has_news(choice):
                    write(event(self._response([choice], usage=self._usage.in_chunk(options))))
            group.forget_logprobs()

        await self._run(take)

    async def _stream_in_turns(self, write: Write) -> None:
        """Write pieces one at a time: each choice begins with the log probabilities of a long prompt, which take
        long.
        """
        writers: dict[int, _ChoiceWriter] = {}
        waiting: asyncio.Queue[tuple[_ChoiceWriter, CompletionOutput, Usage | UnsetType | None] | None]
        waiting = asyncio.Queue()

        def take(prompt_index: int, delta: RequestOutput) -> None:
            self._usage.count(prompt_index, delta)
            usage = self._usage.in_chunk(self._body.stream_options)
            group = self._groups[prompt_index]
            for output in delta.outputs:
                index = prompt_index * len(group.requests) + output.index
                if index not in writers:
                    writers[index] = self._writer(prompt_index, output)
                waiting.put_nowait((writers[index], output, usage))
            group.forget_logprobs()

        running = asyncio.create_task(self._run(take))
        running.add_done_callback(lambda _: waiting.put_nowait(None))
        try:
            while (piece := await waiting.get()) is not None:
                writer, output, usage = piece
                choice = await writer.write_in_turns(output)
                if _has_news(choice):
                    write(large_event(self._response([choice], usage=usage)))
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _writer(self, prompt_index: int, output: CompletionOutput) -> "_ChoiceWriter":
        group = self._groups[prompt_index]
        return _ChoiceWriter(
            self._model,
            self._body,
            group,
            index=prompt_index * len(group.requests) + output.index,
            verbatim=self._verbatim(prompt_index),
        )

    def _verbatim(self, prompt_index: int) -> range:
        """Return where an echo of the prompt shows special tokens: where the client has written them."""
        num_tokens = len(self._groups[prompt_index].prompt_token_ids)
        if not isinstance(self._prompts[prompt_index], str):
            return range(num_tokens)
        if self._body.truncate_prompt_tokens is not None:
            return range(0)
        is_bare = self._body.add_special_tokens is False
        before, after = ((), ()) if is_bare else self._model.frontend.tokenizer.affixes
        return range(len(before), num_tokens - len(after))

    async def _run(self, take: Take) -> None:
        await self._runner.run(self._groups, take, grammar_field=self._body.constraint_field)

    def _response(self, choices: list[CompletionChoice], *, usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._model.fingerprint,
            choices=choices,
            usage=usage,
        )


def _most_likely(entry: Candidates | None, num_top: int) -> Candidates | None:
    """Return a token of the prompt and the most likely ones, without those that only an echo has asked for."""
    return entry and {
        token_id: each for index, (token_id, each) in enumerate(entry.items()) if not index or each.rank <= num_top
    }


def _has_news(choice: CompletionChoice) -> bool:
    """Return true if a chunk is worth sending: one for a token that is held back is not."""
    return bool(choice.text or choice.finish_reason or choice.logprobs or choice.token_ids)


class _ChoiceWriter:
    """Writes one choice: complete, or the pieces of a stream in order."""

    def __init__(
        self, model: ServedModel, body: CompletionRequest, group: RequestGroup, *, index: int, verbatim: range
    ):
        """Prepare to write a choice. An echo of the prompt shows the special tokens at the positions `verbatim`."""
        self._body = body
        self._group = group
        self._index = index
        self._prompt_logprobs = group.prompt_logprobs or []
        self._is_first = True
        self._logprobs: CompletionLogprobsBuilder | None = None
        request = group.requests[0]
        of_tokens = shown(request.params, as_ids=body.return_tokens_as_token_ids)
        if of_tokens is not None:
            self._logprobs = CompletionLogprobsBuilder(
                model.frontend.tokenizer,
                prompt_token_ids=[] if body.echo else group.prompt_token_ids,
                verbatim=verbatim,
                skip_special_tokens=request.params.skip_special_tokens,
                keeps_first_space=bool(request.grammar) and not (body.echo and group.prompt),
                shown=of_tokens,
                num_echoed=len(group.prompt_token_ids) if body.echo else 0,
                of_echo=of_tokens._replace(num_top=self._num_top_of_echo(request.params), asked=()),
            )

    def _num_top_of_echo(self, params: SamplingParams) -> int:
        """Return how many of the most likely tokens are shown for tokens of the prompt."""
        number = self._body.num_logprobs or 0
        return (params.prompt_logprobs or 0) if number == -1 else number

    def write(self, output: CompletionOutput) -> CompletionChoice:
        """Return the next piece, from the new part of the sequence."""
        choice, token_ids, candidates = self._begin(output)
        if self._logprobs is not None:
            choice.logprobs = self._logprobs.add(token_ids, candidates)
        return choice

    async def write_in_turns(self, output: CompletionOutput) -> CompletionChoice:
        """Return the next piece, with log probabilities encoded in turns with other tasks. Clears those of `output`."""
        choice, token_ids, candidates = self._begin(output)
        output.logprobs = None
        if self._logprobs is not None:
            choice.logprobs = await self._logprobs.add_in_turns(token_ids, candidates)
        return choice

    def _begin(self, output: CompletionOutput) -> tuple[CompletionChoice, list[int], list[Candidates | None]]:
        """Return a piece without its `logprobs`, and the tokens that these belong to."""
        body, group = self._body, self._group
        choice = CompletionChoice(
            index=self._index, text=output.text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        token_ids: list[int] = output.token_ids
        candidates: list[Candidates | None] = [*(output.logprobs or ())]
        if body.is_score_only:  # the engine generates at least one token, which was not requested
            choice.text, token_ids, candidates = "", [], []
            choice.finish_reason, choice.stop_reason = output.finish_reason and "length", None
        if body.return_token_ids:
            choice.token_ids = token_ids
        if self._is_first:
            self._is_first = False
            if body.return_token_ids:
                choice.prompt_token_ids = group.prompt_token_ids
            if body.echo:
                choice.text = (group.prompt or "") + choice.text
                token_ids = [*group.prompt_token_ids, *token_ids]
                candidates = [*self._prompt_logprobs, *candidates]
            self._prompt_logprobs = []
        return choice, token_ids, candidates
