"""The parent of `jaxserve serve`: starts the engines' processes and the API workers, and sees to it that none is left.

It holds the listening sockets and the private folder of the Unix sockets, hears the signals, and nothing else: no
request passes through it. What happens when one of the processes ends:

    the only engine         clients get an error, /health turns 503, the workers end, exit code 1
    one of several engines  clients of its requests get an error, the other engines take all new ones, it is started
                            again; not after MAX_RESTARTS in RESTART_PERIOD seconds, nor after as many starts in a
                            row that have failed. One that is silent for SILENCE_LIMIT seconds, but has not ended, is
                            killed; one whose step hangs ends itself (`watchdog_timeout`)
    an API worker           its clients' connections break, the engine aborts its requests, a new one is started, which
                            says of its responses in the background that they have failed; after MAX_RESTARTS in
                            RESTART_PERIOD seconds the server gives up, exit code 1
    the parent              every other process ends by itself, and removes the folder
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from jaxserve.config import MAX_WORKERS, EngineConfig, ServerConfig
from jaxserve.engine import process, wire
from jaxserve.engine.remote import SILENCE_LIMIT, TICK
from jaxserve.engine.subprocesses import Child, exit_words
from jaxserve.errors import StartupError
from jaxserve.server.process.access import check_access
from jaxserve.server.process.endings import how_child_ended
from jaxserve.server.process.listening import bind
from jaxserve.server.process.settings import ENGINE_DIED, FLUSH_TIMEOUT, Settings

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_RESTARTS = 5
RESTART_PERIOD = 60.0
END_TIMEOUT = 10.0
"""Seconds for a process to end that has nothing left to do."""

MAX_FOLDER_LENGTH = 80
"""Maximum bytes of the folder's path: a Unix socket's address has room for 107, including its name."""


class Restarts:
    """The last times at which a process was started again."""

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)

    def may_follow(self, now: float) -> bool:
        """Note another one. Returns false if they have become too frequent."""
        is_frequent = len(self._times) == MAX_RESTARTS and now - self._times[0] < RESTART_PERIOD
        self._times.append(now)
        return not is_frequent


@dataclasses.dataclass
class _Worker:
    """One of the API workers, which outlives its process. A new process gets the same listener."""

    index: int
    listener: socket.socket
    child: Child | None = None
    client: str = ""
    num_starts: int = 0


@dataclasses.dataclass
class _Engine:
    """One of the engines, which outlives its process. `folder` has the sockets of the process that serves, if any."""

    index: int
    child: Child | None = None
    folder: pathlib.Path | None = None
    num_starts: int = 0
    restarts: Restarts = dataclasses.field(default_factory=Restarts)

    @property
    def serving(self) -> Child | None:
        """The process that serves; None while there is none, or it is starting."""
        return None if self.folder is None else self.child


class Supervisor:
    """Runs `config.data_parallel_size` engines and `config.api_workers` workers, until a signal or until they cannot go
    on.

    `start_engine` starts the process of the engine with a number over a folder for its sockets (`engine.process`, or
    one with the same protocol).

    Attributes:
        serving: set when requests are accepted; from then on `address` (host, port) and `worker_pids` are known.
    """

    address: tuple[str, int]
    _folder: pathlib.Path

    def __init__(
        self,
        config: ServerConfig,
        *,
        start_engine: Callable[[int, pathlib.Path], Awaitable[Child]],
        model_path: str,
        tokenizer: str,
        seed: int,
        silence_limit: float = SILENCE_LIMIT,
    ):
        self._silence_limit = silence_limit
        self._listening: set[asyncio.Task[None]] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._config = config
        self._start_engine = start_engine
        self._model_path = model_path
        self._tokenizer = tokenizer
        self._seed = seed
        self.serving = asyncio.Event()
        self._workers: list[_Worker] = []
        self._engines = [_Engine(index) for index in range(config.data_parallel_size)]
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._restarts = Restarts()

    async def run(self) -> int:
        """Serve, and return the exit code.

        It is 0 when told to stop, 1 when the engine or the workers died, 128 + N when signal N came before the server
        had started. Raises StartupError.
        """
        check_access(self._config)  # the workers would find out only after the engine has been loaded
        with self._hearing_signals(), self._listeners() as listeners, _private_folder() as self._folder:
            self.address = listeners[0].getsockname()[:2]
            self._workers = [_Worker(index, listener) for index, listener in enumerate(listeners)]
            try:
                for engine in self._engines:
                    _, engine.folder = await self._start(engine)
                await asyncio.gather(*map(self._start_worker, self._workers))
                if not await self._all_ready():
                    return 128 + self._signals[0]
                for engine in self._engines:
                    self._listen_to(engine)
                await self._open()  # a signal from now on is for a running server
                _children(self._workers)[0].tell("announce")
                self.serving.set()
                return await self._watch()
            finally:
                for task in self._replacing:  # or else processes that are ended here would be started again
                    task.cancel()
                for worker in _children(self._workers):
                    await worker.end(timeout=0)
                await asyncio.gather(*(engine.end(timeout=END_TIMEOUT) for engine in _children(self._engines)))

    async def run_last(self) -> int:
        """Run as the last act of this process: later signals do not change its exit code."""
        try:
            return await self.run()
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the API workers."""
        return [child.pid for child in _children(self._workers)]

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Drain and end; called again, end now, as for signals. Call it in the event loop."""
        self._signals.append(number)
        self._signalled.set()

    async def _start(self, engine: _Engine) -> tuple[Child, pathlib.Path]:
        """Start an engine's process, over a folder of its own if it is not the only one. Returns both."""
        folder = self._folder
        if len(self._engines) > 1:
            folder /= f"{engine.index}-{engine.num_starts}"
            folder.mkdir()
        engine.num_starts += 1
        engine.child = child = await self._start_engine(engine.index, folder)
        return child, folder

    async def _start_worker(self, worker: _Worker) -> None:
        name = f"api-{worker.index}"
        worker.client = f"{name}-{worker.num_starts}"
        worker.num_starts += 1
        is_first = worker.num_starts == 1
        shown = f"API worker {worker.index}"
        settings = Settings(
            server=self._config,
            name=worker.client,
            worker=name,
            tells=worker.index == 0 and is_first,
            folder=str(self._folder),
            engines={engine.index: str(engine.folder) for engine in self._engines if engine.folder is not None},
            num_engines=len(self._engines),
            listener=worker.listener.fileno(),
            tokenizer=self._tokenizer,
            model_path=self._model_path,
            # No two processes draw the same seeds; a single worker that was never restarted draws those of an LLM.
            seed=self._seed + worker.index + MAX_WORKERS * (worker.num_starts - 1),
            metrics_file=str(self._folder / f"metrics-{worker.index}"),
            opens_when_told=is_first,
            log_name=shown if len(self._workers) > 1 else None,
        )
        worker.child = await Child.start(
            shown,
            "jaxserve.server.process.worker",
            settings,
            pass_fds=[worker.listener.fileno()],
        )

    async def _all_ready(self) -> bool:
        """Wait for all processes. False if a signal came first. Raises StartupError with the first error of one that
        failed.
        """
        children = _children(self._engines) + _children(self._workers)
        pending = {asyncio.create_task(child.is_ready()): child for child in children}
        signalled = asyncio.create_task(self._signalled.wait())
        while pending:
            done, _ = await asyncio.wait([*pending, signalled], return_when=asyncio.FIRST_COMPLETED)
            if signalled in done:
                return False
            for task in done:
                child = pending.pop(task)
                if not task.result():
                    raise StartupError(child.error)
        signalled.cancel()
        return True

    async def _open(self) -> None:
        """Let the workers accept requests now that everything is ready, and wait until they do. One that has ended will
        be replaced.
        """
        children = _children(self._workers)
        for child in children:
            child.tell("open")
        await asyncio.gather(*(child.is_ready() for child in children))

    async def _watch(self) -> int:
        """Replace workers and engines that die, until there is a reason to end. Returns the exit code."""
        signalled = asyncio.create_task(self._signalled.wait())
        while True:
            self._replacing = {task for task in self._replacing if not task.done()}
            ends = {worker.child.ended: worker for worker in self._workers if worker.child is not None}
            engines = {engine.serving.ended: engine for engine in self._engines if engine.serving is not None}
            await asyncio.wait([signalled, *engines, *ends, *self._replacing], return_when=asyncio.FIRST_COMPLETED)
            if len(lost := [engine for ended, engine in engines.items() if ended.done()]) == len(engines):
                return await self._lose_engines()
            if signalled.done():
                return await self._drain()
            for engine in lost:
                assert engine.child is not None
                logger.error("%s", await how_child_ended(engine.child))
                engine.child = engine.folder = None
                self._replacing.add(asyncio.create_task(self._replace(engine)))
            for ended, worker in ends.items():
                if not ended.done():
                    continue
                if ended.result() == ENGINE_DIED:  # its process exists, but no longer responds
                    return await self._lose_engines()
                for child in _children(self._engines):
                    child.tell(f"gone {worker.client}")
                logger.error("API worker %d has %s", worker.index, exit_words(ended.result()))
                if not self._restarts.may_follow(time.monotonic()):
                    logger.error("API workers have ended %d times in %.0f s", MAX_RESTARTS + 1, RESTART_PERIOD)
                    return 1
                await self._start_worker(worker)
                assert worker.child is not None
                self._replacing.add(asyncio.create_task(self._report(worker.child)))

    async def _replace(self, engine: _Engine) -> None:
        """Start an engine again that has ended while others serve."""
        await self._tell(f"engine {engine.index} died")
        num_failed = 0
        while num_failed < MAX_RESTARTS and engine.restarts.may_follow(time.monotonic()):
            child, folder = await self._start(engine)
            if await child.is_ready():
                break
            num_failed += 1
            logger.error("engine %d could not start again: %s", engine.index, child.error)
        else:
            logger.error("engine %d has ended too often and stays away", engine.index)
            return
        engine.folder = folder  # not before: workers that start meanwhile would wait for it
        self._listen_to(engine)
        logger.info("engine %d is there again", engine.index)
        await self._tell(f"engine {engine.index} started {folder}")

    def _listen_to(self, engine: _Engine) -> None:
        """Begin to listen to an engine that is up, if it is one of several."""
        if len(self._engines) > 1 and engine.child is not None and engine.folder is not None:
            self._listening.add(asyncio.create_task(self._kill_if_silent(engine.child, engine.folder)))

    async def _kill_if_silent(self, child: Child, folder: pathlib.Path) -> None:
        """Kill an engine's process of which nothing has been heard for too long: then it has ended, and is replaced.

        As clients do, count only the time in which this process runs.
        """
        silence, last = 0.0, 0
        while silence <= self._silence_limit:
            await asyncio.sleep(TICK)
            if child.ended.done():
                return
            beat = last
            with contextlib.suppress(OSError):  # it is not there yet, or no longer
                beat = wire.heartbeat_file(folder).stat().st_mtime_ns
            silence, last = (0.0 if beat != last else silence + TICK), beat
        logger.error("%s has been silent for %.0f s and is killed", child.name, silence)
        child.kill()

    async def _report(self, child: Child) -> None:
        if not await child.is_ready():
            logger.error("%s could not start: %s", child.name, child.error)
            return
        logger.info("%s is there again", child.name)

    async def _drain(self) -> int:
        """Let running requests finish; a second signal or the end of all engines stops the wait."""
        for worker in self._workers:
            worker.listener.close()
        await self._tell("drain")
        self._signalled.clear()
        if len(self._signals) > 1:
            self._signalled.set()
        signalled = asyncio.create_task(self._signalled.wait())
        all_ended = asyncio.create_task(_ends(_children(self._workers)))
        no_engine = asyncio.create_task(_ends(_children(self._engines)))
        limit = self._config.shutdown_timeout + 2 * FLUSH_TIMEOUT + END_TIMEOUT
        await asyncio.wait([all_ended, signalled, no_engine], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if no_engine.done():
            return await self._lose_engines()
        no_engine.cancel()
        if signalled.done():
            await self._tell("stop")
        signalled.cancel()
        await asyncio.wait([all_ended], timeout=2 * FLUSH_TIMEOUT + END_TIMEOUT)
        return 0

    async def _lose_engines(self) -> int:
        """Let the workers report the death of all engines to their clients, and end; the last lines say why."""
        lost = [(engine.index, engine.serving) for engine in self._engines if engine.serving is not None]
        for index, _ in lost:
            await self._tell(f"engine {index} died")
        await asyncio.wait(
            [asyncio.create_task(_ends(_children(self._workers)))], timeout=2 * FLUSH_TIMEOUT + END_TIMEOUT
        )
        for _, child in lost:
            logger.error("%s", await how_child_ended(child))
        return 1

    async def _tell(self, command: str) -> None:
        """Send a command to the workers that serve; end those that are still starting."""
        for worker in self._workers:
            assert worker.child is not None
            if worker.child.is_up:
                worker.child.tell(command)
            else:
                await worker.child.end(timeout=0)

    @contextlib.contextmanager
    def _listeners(self) -> Iterator[list[socket.socket]]:
        """Open a socket per worker on the same port, between which the kernel distributes connections.

        They are kept open here, so that connections of a worker that died wait for the next.
        """
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(bind(self._config))
            others = range(1, self._config.api_workers)
            yield [first, *(stack.enter_context(bind(self._config, beside=first)) for _ in others)]

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def serve(engine: EngineConfig, config: ServerConfig) -> int:
    """Run an engine and a server until a signal; `engine.model` is a directory. Returns the exit code as `run` does.

    Raises StartupError.
    """
    stages = engine.pipeline_parallel_size, engine.tensor_parallel_size
    environments = _device_environments(config.data_parallel_size, *stages)

    async def start_engine(index: int, folder: pathlib.Path) -> Child:
        name = None if config.data_parallel_size == 1 else f"engine {index}"
        settings = process.Settings(
            engine=engine,
            folder=str(folder),
            log_level=config.log_level,
            log_format=config.log_format,
            log_name=name,
        )
        return await Child.start(
            name or "the engine", "jaxserve.engine.process", settings, environment=environments[index]
        )

    supervisor = Supervisor(
        config,
        start_engine=start_engine,
        model_path=engine.model,
        tokenizer=engine.tokenizer or engine.model,
        seed=engine.seed,
    )
    return asyncio.run(supervisor.run_last())


def _children(owners: Sequence[_Worker | _Engine]) -> list[Child]:
    """Return the processes that they have now."""
    return [owner.child for owner in owners if owner.child is not None]


def _device_environments(num_engines: int, num_stages: int, devices_a_stage: int) -> list[dict[str, str]]:
    """Return the variable that gives each of several engines its own GPUs, of those that this process may use.

    Raises StartupError if these are listed and too few.
    """
    if num_engines == 1:
        return [{}]
    num_devices = num_stages * devices_a_stage
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = listed.split(",") if listed else list(map(str, range(num_engines * num_devices)))
    if len(devices) < num_engines * num_devices:
        raise StartupError(
            f"data_parallel_size {num_engines} with tensor_parallel_size {devices_a_stage}"
            + (f" and pipeline_parallel_size {num_stages}" if num_stages > 1 else "")
            + " needs "
            f"{num_engines * num_devices} GPUs, CUDA_VISIBLE_DEVICES has {len(devices)}"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(devices[index * num_devices : (index + 1) * num_devices])}
        for index in range(num_engines)
    ]


async def _ends(children: Iterable[Child]) -> None:
    """Wait until all of them have ended."""
    for child in children:
        await asyncio.shield(child.ended)


@contextlib.contextmanager
def _private_folder() -> Iterator[pathlib.Path]:
    """Yield a folder that only this user may enter (mkdtemp makes it 0700), and remove it at the end."""
    try:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxserve-"))
    except OSError as error:
        raise StartupError(f"cannot make a temporary folder: {error}") from error
    if len(str(folder)) > MAX_FOLDER_LENGTH:
        folder.rmdir()
        raise StartupError(f"the path of the temporary folder {folder} is too long for Unix sockets: set TMPDIR")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
