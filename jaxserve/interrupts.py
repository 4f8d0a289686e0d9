"""Ctrl-C from the beginning of a program to its end, even while threads inside XLA run, which nothing can stop.

A process that exits while such threads run would crash. So the first Ctrl-C raises KeyboardInterrupt, whose handler
waits for them; the next one ends the process at once, by the signal. No jax, and next to no imports.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT
"""Exit code of an interrupted command, as shells report it."""

SECONDS_UNTIL_AGAIN = 0.01
"""How long a signal that came at a time when nothing can be raised waits until it comes again."""


class _Once:
    """A handler that raises KeyboardInterrupt and restores the default action for the next signal.

    No exception leaves a callback of the garbage collector, such as that of jax: a signal that comes there comes again.
    """

    is_called = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_in_callback_of_collector(frame):
            main = threading.main_thread().ident
            assert main is not None
            again = threading.Timer(SECONDS_UNTIL_AGAIN, signal.pthread_kill, (main, number))
            again.daemon = True
            again.start()
            return
        self.is_called = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt


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
    signal.signal(signal.SIGINT, _Once())
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def while_waiting_for_threads(*, is_last: bool = False) -> Iterator[None]:
    """Make Ctrl-C end the process while a program waits for threads inside XLA, if it is the second Ctrl-C.

    The first one already does if the wait was caused by an interrupt or is the program's last act (`is_last`). An
    interrupt that got lost meanwhile, because no exception leaves a `__del__`, is raised at the end. Handlers that a
    program has set are kept, and so is Python's own in an interactive session (`python -i`, IPython, Jupyter), whose
    user would lose more than time: there each Ctrl-C raises KeyboardInterrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Once) and _is_main_thread():  # the handler of a command
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
    """Return true if the handler is Python's own and this thread may replace it. False in a script's background job."""
    return _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_in_callback_of_collector(frame: FrameType | None) -> bool:
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _is_interrupted() -> bool:
    """Return true if this runs because of a KeyboardInterrupt: in an except, a finally or an __exit__."""
    return isinstance(sys.exception(), KeyboardInterrupt)
