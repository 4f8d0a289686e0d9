"""Run the prompts of one HTTP request and pass on what is new for each of them; common to all routes."""

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from jaxserve.engine.frontend import Frontend
from jaxserve.engine.memory import give_memory_back
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.stream import Take
from jaxserve.errors import InvalidRequest, QueueFull, RequestFailed, RequestTimeout
from jaxserve.metrics import REJECTIONS, Metrics, SequenceTimer
from jaxserve.request import RequestOutput
from jaxserve.server.generation.beams import run_groups
from jaxserve.server.protocol.common import StreamOptions
from jaxserve.server.protocol.structured import blame
from jaxserve.server.protocol.usage import Usage, usage
from jaxserve.server.tracing import Times, Tracing
from jaxserve.server.wire.streaming import while_wanted

QUEUE_TIMEOUT = 10.0  # seconds that a large body waits for those before it
MAX_TOKENIZING = 2
MAX_PREPARING = 4
THREAD_THRESHOLD = 16 * 1024  # bytes of a body from which on its prompts are tokenized in a thread
TURN_THRESHOLD = 2**20  # bytes from which on bodies wait for each other only, in a queue of their own


@dataclasses.dataclass(kw_only=True)
class Runner:
    """Tokenizes and runs the prompts of requests, until `stopping` is set.

    `request_timeout`: seconds a request may take, None for any number.
    """

    frontend: Frontend
    metrics: Metrics
    stopping: asyncio.Event
    tracing: Tracing | None = None
    request_timeout: float | None = None
    _tokenizing: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_TOKENIZING))
    """Held while a large body is tokenized: 8 MiB may keep a core busy for seconds, and take 2 GiB."""
    _preparing: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_PREPARING))
    """Held while a body of medium size is tokenized."""

    async def prepare[T](
        self, work: Callable[[threading.Event], T], request: Request, *, num_stored_bytes: int = 0
    ) -> T:
        """Return the result of `work`, which renders templates and tokenizes what `request` has brought, and what was
        stored before.

        If the size of both makes it slow, it runs in a thread, and waits for its turn among similar ones; the
        turn lasts until the thread is done. Raises QueueFull when the turn does not come, and as `while_wanted` does
        when the result is no longer needed; then the event that `work` gets is set.
        """
        size = len(await request.body()) + num_stored_bytes
        if size < THREAD_THRESHOLD:
            return work(threading.Event())
        working = self._in_turn(work, is_large=size >= TURN_THRESHOLD)
        return await while_wanted(working, receive=request.receive, stopping=self.stopping)

    async def _in_turn[T](self, work: Callable[[threading.Event], T], *, is_large: bool) -> T:
        turn = self._tokenizing if is_large else self._preparing
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT):
                await turn.acquire()
        except TimeoutError:
            raise QueueFull("too many large requests are being read", retry_after=QUEUE_TIMEOUT) from None

        def end(task: asyncio.Task[T]) -> None:
            turn.release()
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved, in case nobody waits any more

        gone = threading.Event()
        run = functools.partial(_give_memory_back, work) if is_large else work
        task = asyncio.create_task(asyncio.to_thread(run, gone))
        task.add_done_callback(end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            gone.set()
            raise

    async def run(self, groups: Sequence[RequestGroup], take: Take, *, grammar_field: str | None = None) -> None:
        """Run the prompts until all have finished; `take` is called with what is new for each of them.

        Cancelling aborts what still runs in the engine. Raises what `Frontend.run` raises, and RequestTimeout. An error
        about a grammar names `grammar_field`.
        """
        with _Observer(self.metrics, self.tracing, groups) as observer:

            def observed(index: int, delta: RequestOutput) -> None:
                observer.observe(index, delta)
                take(index, delta)

            try:
                async with asyncio.timeout(self.request_timeout):
                    await run_groups(self.frontend, groups, observed)
            except TimeoutError:
                raise RequestTimeout(f"the request took longer than {self.request_timeout:g} s") from None
            except InvalidRequest as error:
                blame(error, grammar_field)
                raise


def while_wanted_by_client[T](entries: Iterable[T], gone: threading.Event) -> Iterator[T]:
    """Yield the prompts of one request. Raises RequestFailed as soon as its client is `gone`."""
    for entry in entries:
        if gone.is_set():
            raise RequestFailed("the client has gone")
        yield entry


def _give_memory_back[T](work: Callable[[threading.Event], T], gone: threading.Event) -> T:
    """Return the result of `work`, and release the memory that the tokenizer has freed to the system.

    The C library would keep it for this thread, 0.7 to 1.4 GB after 8 MiB of text. This takes 2% of the time that such
    a text does.
    """
    try:
        return work(gone)
    finally:
        give_memory_back()


class _Observer:
    """Records the sequences of one HTTP request in the metrics, from submission to the end. Refused requests are not
    counted.
    """

    def __init__(self, metrics: Metrics, tracing: Tracing | None, groups: Sequence[RequestGroup]):
        self._metrics = metrics
        self._groups = groups
        self._uncounted = {index: len(group.prompt_token_ids) for index, group in enumerate(groups)}
        self._arrivals = {index: group.requests[0].arrival_time for index, group in enumerate(groups)}
        self._timers = [
            [SequenceTimer(metrics, arrival=request.arrival_time) for request in group.requests] for group in groups
        ]

        self._tracing = tracing
        self._num_prompt_tokens = sum(len(group.prompt_token_ids) for group in groups)
        self._num_output_tokens = 0
        self._start = min(self._arrivals.values())
        self._first: float | None = None
        self._queue: float | None = None

    def __enter__(self) -> "_Observer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_refused = self._first is None and isinstance(error, InvalidRequest | QueueFull)
        if is_refused and isinstance(error, QueueFull):
            self._metrics.count(REJECTIONS, len(self._groups))
        if not is_refused:
            self._metrics.count("prompt_tokens_total", sum(self._uncounted.values()))
            now = time.monotonic()
            for timers in self._timers:
                for timer in timers:
                    if not timer.is_finished:
                        timer.finish("error" if isinstance(error, Exception) else "abort", now=now)
            for group, timers in zip(self._groups, self._timers, strict=True):
                self._count(group, timers)
        if self._tracing is not None:
            self._tracing.record(self._times())

    def _count(self, group: RequestGroup, timers: Sequence[SequenceTimer]) -> None:
        """Count what a prompt has asked for, and what it got."""
        metrics, request = self._metrics, group.requests[0]
        metrics.observe("request_prompt_tokens", len(group.prompt_token_ids))
        if request.pooling is None:
            metrics.observe("request_max_num_generation_tokens", max(timer.num_tokens for timer in timers))
            metrics.observe("request_params_max_tokens", request.max_tokens)
            metrics.observe("request_params_n", len(timers))

    def _times(self) -> Times:
        """Return the times of the whole HTTP request; its first token is that of the first prompt that has one."""
        prefill = decode = None
        if self._first is not None and self._queue is not None:
            prefill, decode = self._first - self._start - self._queue, time.monotonic() - self._first
        return Times(
            queue=self._queue,
            prefill=prefill,
            decode=decode,
            prompt_tokens=self._num_prompt_tokens,
            output_tokens=self._num_output_tokens,
        )

    def observe(self, index: int, delta: RequestOutput) -> None:
        """Record a delta of prompt `index`."""
        now = time.monotonic()  # one time for all, so that the parts of a request's time add up
        if index in self._arrivals:  # the first delta: the prompt has been computed
            arrival = self._arrivals.pop(index)
            num_tokens = self._uncounted.pop(index)
            self._metrics.count("prompt_tokens_total", num_tokens)
            self._metrics.count("prompt_tokens_cached_total", delta.num_cached_tokens)
            self._metrics.observe("request_prefill_kv_computed_tokens", num_tokens - delta.num_cached_tokens)
            self._metrics.observe("request_queue_time_seconds", delta.queue_seconds)
            self._metrics.observe("request_prefill_time_seconds", max(0.0, now - arrival - delta.queue_seconds))
            for timer in self._timers[index]:
                timer.start = arrival + delta.queue_seconds
            if self._first is None:
                self._first, self._queue = now, delta.queue_seconds
        for output in delta.outputs:
            timer = self._timers[index][output.index]
            if output.token_ids:
                timer.tokens(len(output.token_ids), now=now)
                self._num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                timer.finish(output.finish_reason, now=now)


class UsageCounter:
    """Counts the tokens of one HTTP request as its deltas arrive.

    The caller adds thoughts to `reasoning_tokens`. With `is_score_only`, the one token that has to be generated was not
    requested, and is not counted.
    """

    def __init__(self, groups: Sequence[RequestGroup], *, is_score_only: bool = False):
        self._prompt_tokens = sum(len(group.prompt_token_ids) for group in groups)
        self._cached_tokens = [0] * len(groups)
        self._completion_tokens = 0
        self._is_score_only = is_score_only
        self.reasoning_tokens = 0

    def count(self, index: int, delta: RequestOutput) -> None:
        """Count a delta of prompt `index`."""
        self._cached_tokens[index] = delta.num_cached_tokens
        if not self._is_score_only:
            for output in delta.outputs:
                self._completion_tokens += len(output.token_ids)

    def total(self) -> Usage:
        """Return the usage so far."""
        return usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(self._cached_tokens),
            reasoning_tokens=self.reasoning_tokens,
        )

    def before_output(self, options: StreamOptions | None) -> Usage | UnsetType | None:
        """Return `usage` of a chunk before the answer's first token, which counts the prompt only."""
        usage = self.in_chunk(options)
        if isinstance(usage, Usage):
            usage.total_tokens = usage.prompt_tokens
            usage.completion_tokens = usage.completion_tokens_details.reasoning_tokens = 0
        return usage

    def in_chunk(self, options: StreamOptions | None) -> Usage | UnsetType | None:
        """Return `usage` of a chunk with text: absent, null if a last chunk will carry it, or the usage so far."""
        if options is None or not options.include_usage:
            return UNSET
        return self.total() if options.continuous_usage_stats else None
