"""What Ctrl-C does from the beginning of a program to its end, with threads inside XLA too, which nothing stops.

A process must not end below such threads: it would crash. So the first Ctrl-C raises KeyboardInterrupt, and who hears
it waits for them; the next one ends the process at once, by the signal. No jax, and next to no imports.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT
"""Of an interrupted command, as shells have it."""


class _Once:
    """A handler that raises KeyboardInterrupt, and leaves the next signal to the system."""

    is_called = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.is_called = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """Around the imports of a command: Ctrl-C ends the process without a word. An exception could get lost in them."""
    if not _is_pythons():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_CODE))
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def of_command() -> Iterator[None]:
    """Around a command: Ctrl-C raises KeyboardInterrupt, and from then on another one kills until the process ends."""
    if not _is_pythons():
        yield
        return
    signal.signal(signal.SIGINT, _Once())
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def while_waiting_for_threads(*, is_last: bool = False) -> Iterator[None]:
    """Around what waits for threads inside XLA, in whatever program: a second Ctrl-C meanwhile ends the process; so
    does the first one if this is done on account of another, or `is_last` that the program does.

    An interrupt that was lost is raised at the end: no exception comes out of a callback of the collector. Handlers
    that a program has set stay, and Python's own too in a session (`python -i`, IPython, Jupyter), whose user would
    lose more than time: there each Ctrl-C raises KeyboardInterrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Once) and _is_main_thread():  # a command's
        yield
    elif not _is_pythons() or hasattr(sys, "ps1"):
        yield
        return
    else:
        handler = _Once()
        signal.signal(signal.SIGINT, signal.SIG_DFL if is_last or _is_interrupted() else handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if handler.is_called:
        raise KeyboardInterrupt


def _is_pythons() -> bool:
    """Whether the handler is Python's, and this thread may set another. In the background of a script none is."""
    return _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_interrupted() -> bool:
    """Whether this runs because of a KeyboardInterrupt: in an except, a finally or an __exit__."""
    return isinstance(sys.exception(), KeyboardInterrupt)
