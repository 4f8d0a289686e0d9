"""The load itself: send each request when it is due, at limited concurrency, until all are answered or the run ends."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxserve.bench.serving.client import INTERRUPTED, Client, Outcome

Render = Callable[[int], bytes]
"""Function that returns the body of the request with the given index."""


class LoadResult(NamedTuple):
    """The outcomes of a load. `start` is on their clock; `num_unsent` requests had not been sent when the run ended."""

    outcomes: list[Outcome]
    start: float
    num_unsent: int
    cpu_seconds: float


async def run_load(
    client: Client,
    arrivals: Sequence[float],
    render: Render,
    *,
    max_concurrency: int | None = None,
    duration: float | None = None,
    on_change: Callable[[int, Outcome | None], None] = lambda _running, _ended: None,
) -> LoadResult:
    """Send request i `arrivals[i]` seconds after the start, or later if `max_concurrency` requests are running then.

    After `duration` seconds nothing more is sent, and running requests may finish. SIGINT or SIGTERM ends the run:
    running requests are cancelled and counted as "interrupted". `on_change` is called with the number of running
    requests and the outcome that has just ended, or None when one has started.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    outcomes: list[Outcome] = []
    tasks: set[asyncio.Task[None]] = set()
    failures: list[BaseException] = []
    room = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None

    async def send(body: bytes, outcome: Outcome) -> None:
        try:
            await client.send(body, outcome)
        finally:
            if room is not None:
                room.release()

    def ended(task: asyncio.Task[None], outcome: Outcome) -> None:
        tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            failures.append(failure)
        on_change(len(tasks), outcome)

    with _on_signals(loop, stop.set):
        cpu_start, start = time.process_time(), time.perf_counter()
        deadline = None if duration is None else start + duration
        for index, arrival in enumerate(arrivals):
            body = render(index)  # rendered before it is due, so that it is sent on time
            due = start + arrival
            if deadline is not None and due >= deadline:
                break
            await _wait(stop, until=due)
            if room is not None and not await _acquire(room, stop, deadline):
                break
            if stop.is_set():
                break
            outcome = Outcome(index=index, due=due if room is None else max(due, time.perf_counter()), sent=0.0)
            outcomes.append(outcome)
            task = loop.create_task(send(body, outcome))
            tasks.add(task)
            task.add_done_callback(lambda task, outcome=outcome: ended(task, outcome))
            on_change(len(tasks), None)
            await asyncio.sleep(0)  # let the task send its request, even if all are due at once
        running, stopped = list(tasks), loop.create_task(stop.wait())
        answered = asyncio.gather(*running, return_exceptions=True)
        await asyncio.wait([answered, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in running:
            task.cancel()
        await asyncio.wait([answered, stopped])
    for failure in failures:
        raise failure
    for outcome in outcomes:
        if not outcome.ended:  # cancelled before the task began
            outcome.sent = outcome.ended = time.perf_counter()
            outcome.kind, outcome.error = INTERRUPTED
    cpu_seconds = time.process_time() - cpu_start
    return LoadResult(outcomes, start, len(arrivals) - len(outcomes), cpu_seconds)


async def _wait(stop: asyncio.Event, *, until: float) -> None:
    """Sleep until `until` (time.perf_counter seconds) or until the run is stopped."""
    delay = until - time.perf_counter()
    if delay > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), delay)


async def _acquire(room: asyncio.Semaphore, stop: asyncio.Event, deadline: float | None) -> bool:
    """Acquire the semaphore. Return false if the run stops or the deadline passes first."""
    acquiring = asyncio.ensure_future(room.acquire())
    stopped = asyncio.ensure_future(stop.wait())
    timeout = None if deadline is None else max(0.0, deadline - time.perf_counter())
    await asyncio.wait([acquiring, stopped], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if acquiring.done():
        return True
    acquiring.cancel()
    return False


@contextlib.contextmanager
def _on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGINT and SIGTERM. Does nothing outside the main thread, where no handler can be installed."""
    added = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(number, act)
            added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)
