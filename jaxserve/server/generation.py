"""From the prompts of one HTTP request to what is new for each of them; completions and chat share it.

Whoever iterates `run` must close it: its end, however it comes, aborts what still runs in the engine.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec import UNSET, UnsetType

from jaxserve.engine.output import RequestGroup
from jaxserve.engine.stream import RequestStream
from jaxserve.errors import ContextLengthExceeded
from jaxserve.metrics import SequenceTimer
from jaxserve.request import RequestOutput
from jaxserve.server.protocol.common import StreamOptions
from jaxserve.server.protocol.usage import Usage, usage
from jaxserve.server.state import ServerState

THREAD_THRESHOLD = 16 * 1024  # bytes of a body from which on its prompts are tokenized outside the event loop


async def prepare[T](work: Callable[[], T], *, size: int) -> T:
    """The result of `work`, which templates and tokenizes: in a thread where the body of `size` bytes makes it slow."""
    return work() if size < THREAD_THRESHOLD else await asyncio.to_thread(work)


def check_text_length(text: str, state: ServerState) -> None:
    """Refuse a text that cannot fit the context however it is tokenized, before time and memory are spent on it.

    Raises ContextLengthExceeded.
    """
    limit = state.frontend.client.info.max_model_len
    at_least = len(text) // state.max_token_length
    if at_least >= limit:
        raise ContextLengthExceeded(
            f"this model's context length is {limit} tokens, but the prompt has at least {at_least}",
            param="prompt",
            code="context_length_exceeded",
        )


async def run(state: ServerState, groups: Sequence[RequestGroup]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Submit the prompts and yield (index of the prompt, what is new for it) until all have finished.

    Raises what `Frontend.submit` and its streams raise.
    """
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await state.frontend.submit(group)) for group in groups]
        observer = stack.enter_context(_Observer(state, groups))
        async with contextlib.aclosing(_merge(streams)) as deltas:
            async for index, delta in deltas:
                observer.observe(index, delta)
                yield index, delta


async def _merge(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The deltas of all streams, as they come."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, stream, arrived)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            index, delta = await arrived.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                num_open -= 1
            else:
                yield index, delta
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: RequestStream, arrived: "asyncio.Queue[tuple[int, RequestOutput | Exception | None]]"
) -> None:
    try:
        async for delta in stream:
            arrived.put_nowait((index, delta))
    except Exception as error:
        arrived.put_nowait((index, error))
    else:
        arrived.put_nowait((index, None))


class _Observer:
    """Puts what happens to the sequences of one HTTP request into the metrics, from submission to the end."""

    def __init__(self, state: ServerState, groups: Sequence[RequestGroup]):
        self._metrics = state.metrics
        self._metrics.prompt_tokens.inc(sum(len(group.prompt_token_ids) for group in groups))
        self._arrivals = {index: group.requests[0].arrival_time for index, group in enumerate(groups)}
        self._timers = [
            [SequenceTimer(state.metrics, arrival=request.arrival_time) for request in group.requests]
            for group in groups
        ]

    def __enter__(self) -> "_Observer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for timers in self._timers:
            for timer in timers:
                if not timer.is_finished:
                    timer.finish("error" if isinstance(error, Exception) else "abort")

    def observe(self, index: int, delta: RequestOutput) -> None:
        """Take a delta of prompt `index`."""
        arrival = self._arrivals.pop(index, None)
        if arrival is not None:  # the first delta: the prompt has been read
            self._metrics.queue_time.observe(delta.queue_seconds)
            self._metrics.prefill_time.observe(max(0.0, time.monotonic() - arrival - delta.queue_seconds))
        for output in delta.outputs:
            timer = self._timers[index][output.index]
            if output.token_ids:
                timer.tokens(len(output.token_ids))
            if output.finish_reason is not None:
                timer.finish(output.finish_reason)


class UsageCounter:
    """Counts the tokens of one HTTP request as its deltas come.

    `is_score_only`: the one token that has to be generated was not asked for, and is not counted.
    """

    def __init__(self, groups: Sequence[RequestGroup], *, is_score_only: bool = False):
        self._prompt_tokens = sum(len(group.prompt_token_ids) for group in groups)
        self._cached_tokens = [0] * len(groups)
        self._completion_tokens = 0
        self._is_score_only = is_score_only

    def count(self, index: int, delta: RequestOutput) -> None:
        """Take a delta of prompt `index`."""
        self._cached_tokens[index] = delta.num_cached_tokens
        if not self._is_score_only:
            self._completion_tokens += sum(len(output.token_ids) for output in delta.outputs)

    def total(self) -> Usage:
        """The usage so far."""
        return usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(self._cached_tokens),
        )

    def in_chunk(self, options: StreamOptions | None) -> Usage | UnsetType | None:
        """`usage` of a chunk with text: absent, or null where a last chunk will carry it, or the usage so far."""
        if options is None:
            return UNSET
        if options.continuous_usage_stats:
            return self.total()
        return None if options.include_usage else UNSET
