"""Compile untrusted grammars in processes that may crash: a crash there fails only the request that caused it.

The engine compiles what has passed again, from the same text, with the same limits and twice the stack, so that a
grammar that crashes the compiler never reaches it. Results are cached, so that a known grammar costs nothing.

Small grammars, which take milliseconds, never wait behind large ones: one process takes nothing else, and a grammar
that keeps it busy for longer than SMALL_SECONDS is started again in the other.
"""

import collections
import concurrent.futures
import contextlib
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

import msgspec

from jaxserve.errors import EngineDead, InvalidRequest, JaxserveError, QueueFull
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions, schema_text
from jaxserve.structured.wire import AnswerJob, ArgumentsJob, Broken, Job, Made, Parameters, Refused, Result

JOB_SECONDS = 10.0
"""Maximum seconds for a grammar; the worst that the other limits allow takes half of it."""

SMALL_BYTES = 32 * 1024
SMALL_SECONDS = 1.0
MAX_QUEUED = 64
"""Maximum number of grammars queued per process; further ones are refused."""

MAX_CACHED = 1024
MAX_CACHED_BYTES = 16 * 2**20
WANTED_SECONDS = 0.25
"""Seconds between checks if somebody still waits for the grammar that is being compiled."""

RESTART_SECONDS = 1.0
"""Seconds that a new process takes, about: what nobody waits for any more is let run if it may take less."""

_RETRY_AFTER = 10.0

logger = logging.getLogger(__name__)


class _Ticket(NamedTuple):
    key: bytes  # the encoded job
    param: str
    future: "concurrent.futures.Future[str]"


class GrammarPool:
    """Makes grammar texts in two processes of its own. Every method is thread-safe."""

    def __init__(self) -> None:
        """Create the pool. Its processes start with the first job, or with `start`."""
        self._cache = _Cache()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._lanes: tuple[_Lane, _Lane] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def start(self) -> None:
        """Start the processes, so that the first grammar need not wait for them."""
        if os.getpid() != self._pid:  # after a fork the lock may be held forever, and no thread feeds the processes
            raise EngineDead("this process is a copy, made by os.fork, of the one whose grammars these are")
        with self._lock:
            if self._lanes is None:
                large = _Lane(self._cache, seconds=JOB_SECONDS, on_late=None)
                small = _Lane(self._cache, seconds=SMALL_SECONDS, on_late=large.put)
                self._lanes = small, large
                self._finalizer = weakref.finalize(self, _close, self._lanes)

    def answer(
        self, constraint: StructuredOutputs, *, is_closed: bool = True, is_strict: bool = True
    ) -> "concurrent.futures.Future[str]":
        """Return a future of the constraint's grammar text, see `make_grammar`. Unless it `is_strict`, what no grammar
        can follow is left out of its schema, and named in the log.

        The future's exception is InvalidRequest, naming the field, for a constraint that cannot be followed or takes
        too much time or memory. Raises QueueFull if too many jobs are queued. Cancelling the future removes the job
        from the queue.
        """
        if constraint.json is not None and not isinstance(constraint.json, str):
            constraint = msgspec.structs.replace(
                constraint, json=schema_text(constraint.json, "structured_outputs.json")
            )
        if isinstance(constraint.structural_tag, dict):
            text = schema_text(constraint.structural_tag, "structured_outputs.structural_tag")
            constraint = msgspec.structs.replace(constraint, structural_tag=text)
        for name in ("json", "regex", "choice", "grammar", "structural_tag"):
            if getattr(constraint, name) is not None:
                return self._submit(AnswerJob(constraint, is_closed, is_strict, f"structured_outputs.{name}"))
        return self._submit(AnswerJob(constraint, is_closed, is_strict, "structured_outputs.json_object"))

    def arguments(
        self, schemas: Sequence[tuple[str, Any, bool]], *, options: JsonOptions
    ) -> "concurrent.futures.Future[str]":
        """Return a future of the schemas of calls' arguments as a JSON list, each as made by `arguments_schema`;
        otherwise like `answer`.

        Each schema comes with the name of its field, and with true if it is strict.
        """
        texts = [Parameters(param, schema_text(schema, param), is_strict) for param, schema, is_strict in schemas]
        return self._submit(ArgumentsJob(texts, options))

    def close(self) -> None:
        """End the processes. Queued jobs fail; a later job starts the processes again. Does nothing in a forked
        copy.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._lanes = None

    def _submit(self, job: Job) -> "concurrent.futures.Future[str]":
        try:
            key = msgspec.msgpack.encode(job)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{job.param} is not valid Unicode: {error.reason}", param=job.param) from error
        ticket = _Ticket(key, job.param, concurrent.futures.Future())
        if (known := self._cache.get(key)) is not None:
            _settle(ticket, known)
            return ticket.future
        self.start()
        lanes = self._lanes
        if lanes is None:
            raise JaxserveError("the pool of grammars has been closed")
        small, large = lanes
        if not (small if len(key) <= SMALL_BYTES else large).put(ticket):
            raise QueueFull("too many grammars are being compiled", retry_after=_RETRY_AFTER)
        return ticket.future


class _Cache:
    """Results of the most recently used grammars."""

    def __init__(self) -> None:
        self._results: collections.OrderedDict[bytes, Made | Refused] = collections.OrderedDict()
        self._told: set[str] = set()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Made | Refused | None:
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
            return result

    def put(self, key: bytes, result: Made | Refused) -> None:
        with self._lock:
            if key in self._results:
                return
            self._results[key] = result
            if isinstance(result, Made):
                self._tell(result.left_out)
            self._num_bytes += _num_bytes(key, result)
            while len(self._results) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                self._num_bytes -= _num_bytes(*self._results.popitem(last=False))

    def _tell(self, left_out: Sequence[str]) -> None:
        """Name in the log what is not followed, each keyword once."""
        for what in left_out:
            keyword = what.split(" at ")[0]
            if keyword not in self._told:
                self._told.add(keyword)
                logger.warning("a schema that is not strict has %.200s: no grammar can follow that, ignored", what)


class _Lane:
    """One process, its queue, and the thread that feeds it."""

    def __init__(self, cache: _Cache, *, seconds: float, on_late: Callable[[_Ticket], bool] | None):
        """Start the process. A job that takes longer than `seconds` is ended; `on_late` may take it over, or else it is
        refused.
        """
        self._cache = cache
        self._seconds = seconds
        self._on_late = on_late
        self._queue: collections.deque[_Ticket] = collections.deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._pid = os.getpid()
        self._process = _Process()
        self._thread = threading.Thread(target=self._run, name="jaxserve-grammars", daemon=True)
        self._thread.start()

    def put(self, ticket: _Ticket) -> bool:
        """Queue a job. Returns false if the queue is closed, or full of jobs that somebody waits for."""
        with self._condition:
            if len(self._queue) >= MAX_QUEUED:
                self._queue = collections.deque(queued for queued in self._queue if not queued.future.cancelled())
            if self._is_closed or len(self._queue) >= MAX_QUEUED:
                return False
            self._queue.append(ticket)
            self._condition.notify()
            return True

    def close(self) -> None:
        """End the process and fail all queued jobs. Does nothing in a forked copy."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._is_closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._condition.notify()
        for ticket in waiting:
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_exception(JaxserveError("the pool of grammars has been closed"))
        self._process.kill()  # its pipes stay open until the thread, which reads them, has ended
        if self._thread is not threading.current_thread():  # close may run in it, when it collects garbage
            self._thread.join()
        self._process.end()  # one that the thread has started meanwhile, too

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._is_closed:
                    self._condition.wait()
                if self._is_closed:
                    return
                ticket = self._queue.popleft()
            if ticket.future.cancelled():
                continue
            result = self._cache.get(ticket.key)  # an equal job may have finished meanwhile
            if result is None:
                try:
                    result = self._process.ask(ticket.key, self._seconds, is_unwanted=ticket.future.cancelled)
                except _Unwanted:
                    if not self._is_closed:
                        self._process.restart()
                    continue
                except _Late:
                    if not self._is_closed:
                        self._process.restart()
                    if self._on_late is not None and self._on_late(ticket):
                        continue
                    message = f"{ticket.param}: the grammar takes too long to compile"
                    result = Refused(message, ticket.param, "unsupported_grammar")
                except _Died as error:
                    if self._is_closed:
                        result = Broken("the pool of grammars has been closed")
                    else:
                        logger.warning("a grammar has ended the process that compiled it (%s): refused", error)
                        self._process.restart()
                        message = f"{ticket.param}: it is too large or too deep to be compiled"
                        result = Refused(message, ticket.param, "unsupported_grammar")
                        self._cache.put(ticket.key, result)
                except OSError as error:
                    result = Broken(f"no process can be started for it: {error}")
                else:
                    if not isinstance(result, Broken):
                        self._cache.put(ticket.key, result)
            if ticket.future.set_running_or_notify_cancel():
                _settle(ticket, result)


class _Late(Exception):
    pass


class _Died(Exception):
    pass


class _Unwanted(Exception):
    pass


class _Process:
    """A running `child`. Jobs can be sent to it before it is ready."""

    def __init__(self) -> None:
        self._popen = self._start()

    def ask(self, job: bytes, seconds: float, *, is_unwanted: Callable[[], bool]) -> Result:
        """Send a job and wait for its result.

        Raises _Late, _Died, or _Unwanted if `is_unwanted` turns true while more is left than a new process takes, and
        OSError if there is no process and none can be started.
        """
        if self._popen.returncode is not None:
            self._popen = self._start()
        popen = self._popen
        assert popen.stdin is not None
        assert popen.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            unwritten = memoryview(len(job).to_bytes(4) + job)
            while unwritten:
                self._wait(popen.stdin, select.POLLOUT, deadline, is_unwanted)
                unwritten = unwritten[os.write(popen.stdin.fileno(), unwritten) :]
            size = int.from_bytes(self._read(popen, 4, deadline, is_unwanted))
            return msgspec.msgpack.decode(self._read(popen, size, deadline, is_unwanted), type=Result)
        except (BrokenPipeError, ValueError) as error:
            raise _Died(str(error)) from error

    def restart(self) -> None:
        self.end()
        with contextlib.suppress(OSError):  # `ask` tries it again
            self._popen = self._start()

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> None:
        popen = self._popen
        popen.kill()
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unread input no longer matters
                    pipe.close()

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        root = str(pathlib.Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        popen = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.structured.child", str(JOB_SECONDS + 5)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert popen.stdin is not None
        os.set_blocking(popen.stdin.fileno(), False)  # a job may be larger than a pipe holds
        return popen

    @staticmethod
    def _read(popen: "subprocess.Popen[bytes]", size: int, deadline: float, is_unwanted: Callable[[], bool]) -> bytes:
        assert popen.stdout is not None
        data = bytearray()
        while len(data) < size:
            _Process._wait(popen.stdout, select.POLLIN, deadline, is_unwanted)
            part = os.read(popen.stdout.fileno(), size - len(data))
            if not part:
                code = popen.wait()
                raise _Died(signal.Signals(-code).name if code < 0 else f"exit code {code}")
            data += part
        return bytes(data)

    @staticmethod
    def _wait(pipe: IO[bytes], event: int, deadline: float, is_unwanted: Callable[[], bool]) -> None:
        """Wait until a pipe can be read or written."""
        poll = select.poll()
        poll.register(pipe.fileno(), event)
        while True:
            left = max(0.0, deadline - time.monotonic())
            if poll.poll(min(left, WANTED_SECONDS) * 1000):
                return
            if left <= WANTED_SECONDS:
                raise _Late
            if left > RESTART_SECONDS and is_unwanted():
                raise _Unwanted


def _settle(ticket: _Ticket, result: Result) -> None:
    match result:
        case Made(text):
            ticket.future.set_result(text)
        case Refused(message, param, code):
            ticket.future.set_exception(InvalidRequest(message, param=param, code=code))
        case Broken(traceback):
            logger.error("a grammar could not be checked:\n%s", traceback)
            ticket.future.set_exception(JaxserveError(f"{ticket.param}: the grammar could not be checked"))


def _num_bytes(key: bytes, result: Made | Refused) -> int:
    return len(key) + len(result.text if isinstance(result, Made) else result.message)


def _close(lanes: tuple[_Lane, _Lane]) -> None:
    for lane in lanes:
        lane.close()
