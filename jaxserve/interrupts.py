"""Ctrl-C from the beginning of a program to its end, even while threads inside XLA run, which nothing can stop.

A process that exits while such threads run would crash. So the first Ctrl-C raises KeyboardInterrupt, whose handler
waits for them; the next one ends the process at once, by the signal. No jax, and next to no imports.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGINT
"""Exit code of an interrupted command, as shells report it."""

SECONDS_UNTIL_AGAIN = 0.01
"""When an interrupt that got lost comes again."""


class _Once:
    """A handler that raises KeyboardInterrupt and restores the default action for the next signal."""

    def __init__(self) -> None:
        self.is_called = False
        self.is_in_hook = False
        self.lost: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_in_hook:  # which no exception leaves either
            self.lost.put(True)
            return
        self.is_called = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt


@contextlib.contextmanager
def _coming_again(handler: _Once) -> Iterator[None]:
    """Let an interrupt that gets lost come again: no exception leaves a callback of the garbage collector, such as jax
    has, or a `__del__`.

    The main thread may hold any lock then, so the thread that sends the signal is there before.
    """
    hook, main, is_over = sys.unraisablehook, threading.get_ident(), threading.Event()

    def send() -> None:
        while handler.lost.get() and not is_over.wait(SECONDS_UNTIL_AGAIN):
            signal.pthread_kill(main, signal.SIGINT)

    def send_again(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt) or threading.get_ident() != main:
            hook(unraisable)
            return
        handler.is_in_hook = True
        signal.signal(signal.SIGINT, handler)
        handler.lost.put(True)
        handler.is_in_hook = False

    threading.Thread(target=send, name="jaxserve-interrupts", daemon=True).start()
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        is_over.set()
        handler.lost.put(False)


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """Make Ctrl-C exit at once and silently. For the imports of a command, in which an exception could get lost."""
    if not _is_pythons():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_CODE))
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def of_command() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, and a second one kill the process, while a command runs."""
    if not _is_pythons():
        yield
        return
    signal.signal(signal.SIGINT, handler := _Once())
    with _coming_again(handler):
        yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def while_waiting_for_threads(*, is_last: bool = False) -> Iterator[None]:
    """Make Ctrl-C end the process while a program waits for threads inside XLA, if it is the second Ctrl-C.

    The first one already does if the wait was caused by an interrupt or is the program's last act (`is_last`). An
    interrupt that got lost at the very end is raised after it. Handlers that a program has set are kept, and so is
    Python's own in an interactive session (`python -i`, IPython, Jupyter), whose user would lose more than time: there
    each Ctrl-C raises KeyboardInterrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Once) and _is_main_thread():  # the handler of a command
        yield
    elif not _is_pythons() or hasattr(sys, "ps1"):
        yield
        return
    else:
        handler = _Once()
        ends_at_once = is_last or _is_interrupted()
        signal.signal(signal.SIGINT, signal.SIG_DFL if ends_at_once else handler)
        try:
            with contextlib.nullcontext() if ends_at_once else _coming_again(handler):
                yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if handler.is_called:
        raise KeyboardInterrupt


def _is_pythons() -> bool:
    """Return true if the handler is Python's own and this thread may replace it. False in a script's background job."""
    return _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_interrupted() -> bool:
    """Return true if this runs because of a KeyboardInterrupt: in an except, a finally or an __exit__."""
    return isinstance(sys.exception(), KeyboardInterrupt)
