"""Start the server's processes (the engine, the API workers) from its parent; each side notices when the other ends.

A child reads its settings from the first line of its standard input, then one command per line. "end" is the last
command; an end of the input without it means that the parent is gone. On its standard output the child reports that it
is ready, or why it could not start, and later why it ends. No signals, no pickle.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import msgspec

from jaxserve import logs
from jaxserve.errors import JaxserveError

GRACE_SECONDS = 10
"""Maximum seconds for a child to end in good order when its parent has gone."""


_END = "end"


class Answer(msgspec.Struct, frozen=True):
    """A line from a child: `error` is None when it is ready."""

    error: str | None = None


class Parent:
    """The parent, seen from a child.

    Attributes:
        on_command: called with each command, on a thread of its own.
        on_end: called on that thread when the child is to end, by command or because the parent has gone.
        folder: removed when the parent has gone and cannot do so itself.
    """

    def __init__(self) -> None:
        self._is_gone = False
        self.on_command: Callable[[str], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.folder: str | None = None
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is for people
        # Without a buffer, whose lock would be held by a thread that waits at the end of the process.
        self._commands = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
        self._settings = self._commands.readline()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def settings[T](self, kind: type[T]) -> T:
        """Return the settings of this process."""
        return msgspec.json.decode(self._settings, type=kind)

    def answer(self, error: str | None = None) -> None:
        """Say that this process is ready, or why it never will be, or no longer is."""
        with contextlib.suppress(BrokenPipeError):
            self._answers.write(msgspec.json.encode(Answer(error)) + b"\n")

    def _listen(self) -> None:
        command = ""
        for line in self._commands:
            command = line.decode().strip()
            if command == _END:
                break
            if self.on_command is not None:
                self.on_command(command)
        self._is_gone = command != _END
        if self.on_end is not None:
            impatience = threading.Timer(GRACE_SECONDS, self._exit)
            impatience.daemon = True
            impatience.start()
            self.on_end()
        else:
            self._exit()

    def _exit(self) -> None:
        self.tidy()
        os._exit(1)

    def tidy(self) -> None:
        """Clean up in place of the parent, if it has gone."""
        if self._is_gone and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def run_child(main: Callable[[Parent], int]) -> int:
    """Run the `main` of a child's module and report its errors to the parent. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.configure("info", in_background=True)  # until the settings say otherwise
    parent = Parent()
    try:
        code = main(parent)
    except JaxserveError as error:
        logging.getLogger(__name__).debug("the start has failed", exc_info=error)
        parent.answer(str(error))
        code = 1
    except Exception:  # Python's own report might not be written, or not be read
        logging.getLogger(__name__).exception("this process has failed")
        code = 1
    parent.tidy()
    return code


def exit_words(code: int) -> str:
    """Return what to say of a process that has ended with this code."""
    if code == -signal.SIGKILL:
        return "been killed (SIGKILL: by hand, or by the system for lack of memory)"
    return f"ended with code {code}"


class Child:
    """A child process, seen from its parent.

    Attributes:
        name: what it is, for log lines.
        is_up: true once it has reported that it is ready.
        error: the reason why it could not start, if it has reported one.
        ended: a future of its exit code.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process):
        self.name = name
        self.is_up = False
        self.error: str | None = None
        self.ended = asyncio.ensure_future(process.wait())
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        settings: msgspec.Struct,
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Run `python -m module`, which calls `run_child`; `environment` are variables besides its parent's."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C is for the parent alone
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
        )
        child = cls(name, process)
        child._write(msgspec.json.encode(settings))
        return child

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def is_ready(self) -> bool:
        """Wait until the child is ready (True), or has ended or is about to (False, with `error`)."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self.ended
            self.error = f"{self.name} has {exit_words(code)} while it started"
            return False
        self.error = msgspec.json.decode(line, type=Answer).error
        self.is_up = self.error is None
        return self.is_up

    async def last_words(self, *, timeout: float) -> str | None:
        """Return why a child that was ready ends; None if it has not said it after `timeout` seconds."""
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
                return msgspec.json.decode(line, type=Answer).error if line else None
        return None

    def tell(self, command: str) -> None:
        """Send a command. A child that is not up does not hear it."""
        self._write(command.encode())

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():  # it has ended, as `ended` shows
            self._process.stdin.write(line + b"\n")

    def kill(self) -> None:
        """Kill the child, which need not be able to hear anything."""
        if not self.ended.done():
            self._process.kill()

    async def end(self, *, timeout: float) -> None:
        """Send the child the command to end, wait, and kill it after `timeout` seconds."""
        assert self._process.stdin is not None
        self.tell(_END)
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), timeout)
        if not self.ended.done():
            self._process.kill()
            await self.ended
