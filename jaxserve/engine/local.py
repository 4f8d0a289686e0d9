"""The engine in a thread of this process: what LLM, notebooks and the tests hold."""

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, override

import jax
import jax.extend

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient, EngineInfo, EngineSnapshot, EngineStats, OutputSink
from jaxserve.engine.departures import Departures
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import give_memory_back
from jaxserve.errors import EngineDead, InvalidRequest, QueueFull
from jaxserve.execution.programs.workers import Worker
from jaxserve.interrupts import while_waiting_for_threads
from jaxserve.request import EngineOutput, EngineRequest
from jaxserve.scheduling.snapshot import SchedulerSnapshot

if TYPE_CHECKING:
    from jax.sharding import Mesh

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.02
"""Seconds between two snapshots of the engine's state while it is busy."""


MAX_WAITING_SHOWN = 64
"""Waiting requests that a snapshot has: the queue may be long."""


WATCHDOG_TIMEOUT = 300.0
"""Seconds in which a GPU must have done a step, unless an option says otherwise."""
WATCH_INTERVAL = 1.0
"""Seconds in which the time of a wait for the device is counted. Only time in which this process runs is: while it is
paused, or its machine is, no step can end.
"""


type _TakenSnapshot = concurrent.futures.Future[tuple[EngineStats, int, SchedulerSnapshot]]


def _after_fork(client: "weakref.ref[LocalEngineClient]", xla_clients: Collection[object]) -> None:
    """Mark clients as copies in a child made by os.fork, which lacks the engine's thread.

    Also keep the engine and the contents of jax's modules alive until the process ends: their destructors would wait
    for threads that do not exist.
    """
    LocalEngineClient.is_in_copy = True
    copy = client()
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("jax", "jaxlib")]
    for kept in (copy, *xla_clients, *(value for module in modules for value in vars(module).values())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


@dataclasses.dataclass(slots=True, eq=False)
class _Listener:
    """The subscriber to one request's outputs."""

    sink: OutputSink
    is_aborted: bool = False


class LocalEngineClient(EngineClient):
    """Runs an Engine in a daemon thread. Thread-safe; the engine is only used by its own thread."""

    is_in_copy: ClassVar[bool] = False
    """True if os.fork made this process from one with an engine: neither the engine nor jax works here."""

    def __init__(
        self, engine: Engine, info: EngineInfo, *, max_num_waiting: int | None = None, watchdog_timeout: float = 0.0
    ):
        self.info = info
        self._engine = engine
        self._max_num_waiting = max_num_waiting
        self._condition = threading.Condition()
        self._commands: list[Callable[[], object]] = []  # for the engine's thread, in the order they were given
        self._num_submitted = 0
        self._departures = Departures()
        self._reset: concurrent.futures.Future[bool] | None = None  # common to all who wait for an empty prefix cache
        self._snapshots: list[_TakenSnapshot] = []  # that callers wait for
        self._listeners: dict[str, _Listener] = {}  # by id, of the requests that callers regard as unfinished
        self._heard: dict[str, _Listener] = {}  # of those that the engine knows; its thread's own
        self._stats = engine.stats()
        self._published = 0.0
        self._is_closing = False
        self._is_freed = False
        self._is_hung = False
        self._is_profiling = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        engine.runner.on_programs = self._wake
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()
        if watchdog_timeout:
            threading.Thread(
                target=self._watch, args=(watchdog_timeout,), name="jaxserve-watchdog", daemon=True
            ).start()
        xla_clients = tuple(jax.extend.backend.backends().values())
        os.register_at_fork(after_in_child=functools.partial(_after_fork, weakref.ref(self), xla_clients))

    @property
    def engine(self) -> Engine:
        """The engine. Its thread runs it: others may read what does not change, and set `on_plan`."""
        return self._engine

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        mesh: "Mesh | None" = None,
        progress: bool = False,
        workers: Sequence[Worker] = (),
        owns_process: bool = False,
    ) -> "LocalEngineClient":
        """Load the model, size the KV cache, compile the steps, and run.

        `mesh` overrides `config.tensor_parallel_size`; `progress` shows bars; `workers` are those of
        `early.start_early`. With `owns_process`, what there is after the start lives as long as the process: full
        garbage collections, each of which would hold a step up for a tenth of a second, pass over it. Raises
        StartupError, and EngineDead in a forked child, where jax would wait forever.
        """
        cls._check_process()
        from jaxserve.engine.startup import start_engine

        with contextlib.ExitStack() as on_error:
            with while_waiting_for_threads():
                engine, info = start_engine(config, mesh=mesh, progress=progress, workers=workers)
                on_error.callback(engine.close)
            on_error.pop_all()
        if owns_process:
            gc.collect()
            gc.freeze()
        timeout = config.watchdog_timeout
        if timeout is None:  # a CPU may well take so long for a step of a large model
            timeout = 0.0 if engine.runner.mesh.devices.flat[0].platform == "cpu" else WATCHDOG_TIMEOUT
        return cls(engine, info, max_num_waiting=config.max_num_waiting, watchdog_timeout=timeout)

    @override
    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        for request in requests:
            self._engine.scheduler.check_admissible(request)
        with self._lock():
            self.raise_if_dead()
            if self._max_num_waiting is not None:
                num_waiting = self._engine.num_waiting + self._num_submitted
                if num_waiting + len(requests) > self._max_num_waiting:
                    raise QueueFull(
                        f"{num_waiting} requests are waiting, at most {self._max_num_waiting} may",
                        retry_after=self._departures.wait(num_waiting, now=self._engine.seconds["total"]),
                    )
            ids = [request.request_id for request in requests]
            if len(set(ids)) < len(ids) or not self._listeners.keys().isdisjoint(ids):
                raise InvalidRequest("a request with this id is running already", param="request_id")
            listeners = {request_id: _Listener(sink) for request_id in ids}
            self._listeners.update(listeners)
            self._num_submitted += len(requests)
            self._commands.append(functools.partial(self._add, list(requests), listeners))
            self._condition.notify()

    @override
    def abort(self, request_ids: list[str]) -> None:
        if self.is_in_copy:
            return
        with self._condition:
            aborted = [request_id for request_id in request_ids if request_id in self._listeners]
            for request_id in aborted:
                self._listeners.pop(request_id).is_aborted = True
            self._commands.append(functools.partial(self._abort, aborted))
            self._condition.notify()

    @override
    def stats(self) -> EngineStats:
        self._check_process()
        return self._stats

    @override
    def snapshot(self) -> EngineSnapshot:
        taken: _TakenSnapshot = concurrent.futures.Future()
        with self._lock():
            self.raise_if_dead()
            self._snapshots.append(taken)
            self._condition.notify()
        stats, num_output_tokens, (running, waiting, blocks) = taken.result()
        return EngineSnapshot(
            stats=stats, num_output_tokens=num_output_tokens, running=running, waiting=waiting, blocks=blocks.runs()
        )

    @override
    def is_alive(self) -> bool:
        return not self.is_in_copy and self._error is None and not self._is_closing

    @override
    def reset_prefix_cache(self) -> bool:
        with self._lock():
            self.raise_if_dead()
            reset = self._reset = self._reset or concurrent.futures.Future()
            self._condition.notify()
        return reset.result()

    @override
    def start_profile(self, directory: str) -> None:
        with self._lock():
            self.raise_if_dead()
            if self._is_profiling:
                raise InvalidRequest("a profile is being recorded already")
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would slow the traced code down several times
            options.enable_hlo_proto = False  # the HLO of a large model's programs is more than the file's 2 GiB
            jax.profiler.start_trace(directory, profiler_options=options)
            self._is_profiling = True

    @override
    def stop_profile(self) -> None:
        with self._lock():
            if not self._is_profiling:
                raise InvalidRequest("no profile is being recorded")
            self._is_profiling = False
        jax.profiler.stop_trace()

    @override
    def close(self) -> None:
        if self.is_in_copy:
            return
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        with while_waiting_for_threads():
            if threading.current_thread() is not self._thread:
                self._ended.wait()  # interrupted in Thread.join, Python 3.12 takes the thread for ended
                if self._is_hung:
                    return  # neither its thread nor the device would ever be done
                self._thread.join()
            with self._condition:
                is_first, self._is_freed = not self._is_freed, True
            if is_first:
                self._engine.close()
                give_memory_back()

    @classmethod
    def _check_process(cls) -> None:
        if cls.is_in_copy:
            raise EngineDead(
                "this process is a copy, made by os.fork, of one that has started an engine: start one in a process "
                "that is spawned instead"
            )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock. Raises EngineDead in a forked child, where the lock may be held forever."""
        self._check_process()
        with self._condition:
            yield

    def raise_if_dead(self) -> None:
        """Raise EngineDead if the engine has failed or is closed."""
        if self._error is not None:
            raise EngineDead(f"the engine has stopped: {_why(self._error)}")
        if self._is_closing:
            raise EngineDead("the engine is closed")

    def _run(self) -> None:
        try:
            while self._take_commands():
                outputs = self._engine.step()
                if self._is_hung:
                    return
                if not self._engine.has_requests:
                    self._stats = self._engine.stats()  # the receiver of the last answer must see that nothing runs
                self._deliver(outputs)
                self._publish_stats()
            self._engine.abort(list(self._heard))
            self._stats = self._engine.stats()  # from now on nothing runs
        except BaseException as error:
            logger.exception("the engine has stopped")
            with self._condition:
                self._error = error
        try:
            self._end_all()
        finally:
            self._ended.set()

    def _watch(self, timeout: float) -> None:
        """End all requests when the engine has been starting a program, or waiting for the device, for `timeout`
        seconds. It is left alone then.
        """
        waited, seen, interval, ended = 0.0, 0, min(WATCH_INTERVAL, timeout), self._ended
        while not ended.wait(interval):
            waits = self._engine.runner.num_waits
            waited, seen = (waited + interval if waits % 2 and waits == seen else 0.0), waits
            if waited >= timeout:
                break
        else:
            return
        logger.error("a step has not ended for %g s: the engine hangs", timeout)
        with self._condition:
            self._is_hung = True
            self._error = TimeoutError(f"a step has not ended for {timeout:g} s, the limit by watchdog_timeout")
        try:
            self._end_all()
        finally:
            self._ended.set()

    def _wake(self) -> None:
        """Let the engine's thread look whether there is something to do."""
        with self._condition:
            self._condition.notify()

    def _take_commands(self) -> bool:
        """Pass commands to the engine; sleep while there is nothing to do. Returns false on closing."""
        with self._condition:
            while not (self._is_closing or self._commands or self._reset or self._snapshots):
                if self._engine.has_work:
                    return True
                self._stats = self._engine.stats()
                self._condition.wait()
            if self._is_closing:
                return False
            commands, self._commands = self._commands, []
            self._num_submitted = 0
            for command in commands:
                command()
            if self._reset is not None:
                self._reset.set_result(self._engine.scheduler.reset_prefix_cache())
                self._reset = None
            self._stats = self._engine.stats()
            if self._snapshots:
                snapshot = self._engine.scheduler.snapshot(max_waiting=MAX_WAITING_SHOWN)
                for wanted in self._snapshots:
                    wanted.set_result((self._stats, self._engine.num_output_tokens, snapshot))
                self._snapshots.clear()
        return True

    def _add(self, requests: list[EngineRequest], listeners: dict[str, _Listener]) -> None:
        self._engine.add(requests)
        self._heard.update(listeners)

    def _abort(self, request_ids: list[str]) -> None:
        self._engine.abort(request_ids)
        num_heard = len(self._heard)
        for request_id in request_ids:
            self._heard.pop(request_id, None)  # it may have finished meanwhile
        self._departures.count(num_heard - len(self._heard), now=self._engine.seconds["total"])

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Pass outputs to the sinks, one list each. An id may have been reused; here it is the one that the engine
        knows.
        """
        by_sink: dict[OutputSink, list[EngineOutput]] = collections.defaultdict(list)
        with self._condition:
            num_heard = len(self._heard)
            for output in outputs:
                listener = self._heard[output.request_id]
                if output.finish_reason is not None:
                    del self._heard[output.request_id]
                    if self._listeners.get(output.request_id) is listener:
                        del self._listeners[output.request_id]
                if not listener.is_aborted:
                    by_sink[listener.sink].append(output)
            self._departures.count(num_heard - len(self._heard), now=self._engine.seconds["total"])
        for sink, batch in by_sink.items():
            try:
                sink(batch)
            except Exception:  # the other requests' callers must not be affected
                logger.exception("a sink has raised; its requests are aborted")
                self.abort([output.request_id for output in batch])

    def _publish_stats(self) -> None:
        now = time.monotonic()
        if now - self._published >= STATS_INTERVAL:
            self._published = now
            self._stats = self._engine.stats()

    def _end_all(self) -> None:
        reason = "abort" if self._error is None else "error"
        message = None if self._error is None else f"the engine has stopped: {_why(self._error)}"
        with self._condition:
            self._heard = dict(self._listeners)
            reset, snapshots = self._reset, self._snapshots
            self._reset, self._snapshots = None, []
        self._deliver([EngineOutput(request_id=i, finish_reason=reason, error=message) for i in self._heard])
        if reset is not None:
            reset.set_result(False)
        for wanted in snapshots:
            wanted.set_exception(EngineDead(message or "the engine is closed"))


def _why(error: BaseException) -> str:
    """Return the text of an error; a MemoryError has none."""
    return str(error) or type(error).__name__
