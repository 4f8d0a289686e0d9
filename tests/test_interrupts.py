"""Ctrl-C: while a command is imported, and once and twice while programs compile."""

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from waiting import PATIENCE

from jaxserve import interrupts
from jaxserve.interrupts import while_waiting_for_threads


@pytest.fixture(autouse=True)
def handler():
    """Handle SIGINT as a new process does, then restore pytest's handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def current():
    return signal.getsignal(signal.SIGINT)


def test_the_second_one_is_left_to_the_system():
    left_to = []

    def wait():
        with while_waiting_for_threads():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                left_to.append(current())

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert left_to == [signal.SIG_DFL]
    assert current() is signal.default_int_handler


def test_after_an_interrupt_the_next_one_is_the_second():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with while_waiting_for_threads():
            assert current() == signal.SIG_DFL
    assert current() is signal.default_int_handler


def test_at_the_end_of_a_program_the_first_one_is_left_to_the_system():
    with while_waiting_for_threads(is_last=True), while_waiting_for_threads():
        assert current() == signal.SIG_DFL
    assert current() is signal.default_int_handler


def test_handlers_of_a_program_stay():
    for handler in (signal.SIG_IGN, signal.SIG_DFL, lambda *_: None):
        signal.signal(signal.SIGINT, handler)
        for guard in (while_waiting_for_threads, interrupts.of_command, interrupts.exiting_at_once):
            with guard():
                assert current() is handler
            assert current() is handler


def test_a_session_keeps_its_handler(monkeypatch):
    """Whose user would lose more than the time that threads take."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with while_waiting_for_threads():
        assert current() is signal.default_int_handler
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_other_threads_leave_handlers_alone():
    seen = []

    def wait():
        with while_waiting_for_threads():
            seen.append(current())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(PATIENCE)
    assert seen == [signal.default_int_handler]


def raise_in_collection():
    def interrupt(phase, _):
        if phase == "start" and not has_come:
            has_come.append(phase)
            signal.raise_signal(signal.SIGINT)

    has_come = []
    gc.callbacks.append(interrupt)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(interrupt)


def raise_in_finalizer():
    weakref.finalize(Finalized(), signal.raise_signal, signal.SIGINT)


@pytest.mark.parametrize("is_command", [False, True])
@pytest.mark.parametrize("interrupt", [raise_in_collection, raise_in_finalizer])
def test_an_interrupt_that_gets_lost_comes_again(interrupt, is_command, monkeypatch):
    """While the program waits: a start that nobody wants any longer takes a minute. No exception leaves a callback of
    the collector, of which jax has one, and no finalizer.
    """
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def wait():
        with while_waiting_for_threads():
            interrupt()
            threading.Event().wait(PATIENCE)
            pytest.fail("the interrupt is lost")

    def command():
        with interrupts.of_command():
            wait()

    with pytest.raises(KeyboardInterrupt):
        command() if is_command else wait()
    assert current() == (signal.SIG_DFL if is_command else signal.default_int_handler)
    assert sys.unraisablehook == told.append
    assert not told


def test_an_interrupt_that_comes_while_a_lost_one_is_sent_again(monkeypatch):
    put = queue.SimpleQueue.put

    class Interrupted(queue.SimpleQueue):
        """A queue whose first caller is interrupted, by the signal or by another one."""

        is_first = True

        def put(self, item):
            put(self, item)
            if self.is_first:
                self.is_first = False
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)

    def wait():
        with while_waiting_for_threads():
            raise_in_finalizer()
            threading.Event().wait(PATIENCE)
            pytest.fail("the interrupt is lost")

    with pytest.raises(KeyboardInterrupt):
        wait()


def test_an_interrupt_that_gets_lost_at_the_end_is_raised(monkeypatch):
    monkeypatch.setattr(interrupts, "SECONDS_UNTIL_AGAIN", 10)
    with pytest.raises(KeyboardInterrupt), while_waiting_for_threads():
        raise_in_finalizer()
    assert current() is signal.default_int_handler


def test_other_exceptions_that_get_lost_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    with while_waiting_for_threads():
        weakref.finalize(Finalized(), int, "x")
    assert told == [ValueError]


class Finalized:
    """An object whose finalizer runs."""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with one CPU device as users have it, even if the tests ignore SIGINT."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


IMPORT = """
import sys, weakref
from jaxserve.__main__ import main

class Finalized: pass

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {interrupt}

assert not sys.modules.keys() & {{"jaxserve.cli", "jaxserve.interrupts", "argparse", "msgspec"}}
sys.meta_path.insert(0, Interrupting())
sys.argv = ["jaxserve", "--version"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "interrupt"),
    [
        ("jaxserve.interrupts", "signal.raise_signal(signal.SIGINT)"),
        ("jaxserve.cli", "signal.raise_signal(signal.SIGINT)"),
        ("jaxserve.bench.commands", "signal.raise_signal(signal.SIGINT)"),
        ("jaxserve.flags", "weakref.finalize(Finalized(), signal.raise_signal, signal.SIGINT)"),  # lost as exception
    ],
)
def test_interrupted_imports_are_silent(module, interrupt):
    result = run(IMPORT.format(module=module, interrupt=interrupt))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


COMPILE = """
import os, sys, threading, time
from jaxserve.execution.programs.compile import CompiledSteps

def compile(*_):
    os.kill(os.getpid(), signal.SIGINT)
    while signal.getsignal(signal.SIGINT) != signal.SIG_DFL:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

CompiledSteps._compile = compile
"""
COMMAND = "from jaxserve.__main__ import main; sys.exit(main())"
START = "from jaxserve import LLM; LLM('scribe-2m', progress=False)"
GENERATE = """
from jaxserve import LLM
with LLM('scribe-2m', progress=False, warmup="none") as llm:
    llm.generate("a", use_tqdm=False)
"""
END = """
from jaxserve import generate
try:
    generate("a", model="scribe-2m")
except KeyboardInterrupt:
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (COMMAND, "generate a --model scribe-2m --warmup full"),
        (COMMAND, "bench latency --model scribe-2m --batches 1:8:2"),
        (START, ""),
        (GENERATE, ""),
        (END, ""),
    ],
    ids=["generate", "bench", "start", "with", "exit"],
)
def test_a_second_one_ends_the_process_at_once(program, arguments):
    """Below a thread that would never end: one of a start, or the engine's."""
    result = run(COMPILE + program, *arguments.split())
    assert result.returncode == -signal.SIGINT, result.stderr
    assert "Traceback" not in result.stderr
