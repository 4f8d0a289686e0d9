"""The destination of log lines."""

import io
import logging
import re
import subprocess
import sys

import pytest
from waiting import PATIENCE

from jaxserve import logs


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_go_to_what_standard_error_is_now(monkeypatch, form):
    """A command that runs in a test leaves its handler behind, and the test's standard error is closed afterwards."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure("info", form, process_name="engine 7")
    logging.getLogger("jaxserve.test").info("one")
    logging.getLogger("jaxserve.test").debug("too little")
    assert "one" in first.getvalue()
    assert "engine 7" in first.getvalue()
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    logging.getLogger("jaxserve.test").info("two")
    assert "two" in second.getvalue()
    assert len(second.getvalue().splitlines()) == 1


LOG = """
import logging, sys
from jaxserve import logs
logs.MAX_HELD_BYTES = 2**20
logs.configure("info", sys.argv[1], in_background=True)
for number in range(30_000):
    logging.getLogger("jaxserve.test").info("line %d %s", number, "x" * 100)
print("done", flush=True)
sys.stdin.readline()
logging.getLogger("jaxserve.test").info("the last line")
"""


def start(form, stderr=subprocess.PIPE):
    command = [sys.executable, "-c", LOG, form]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_nobody_reads_in_time_is_dropped_and_counted(form):
    with start(form) as process:
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
        lines = process.stderr.read().splitlines()
        assert process.wait(PATIENCE) == 0
    dropped = [int(found[1]) for line in lines if (found := re.search(r"could not be written in time: (\d+)", line))]
    written = [line for line in lines if re.search(r"line \d+ x|the last line", line)]
    assert sum(dropped) + len(written) == 30_001
    assert sum(dropped) > 0


def test_a_process_ends_though_nobody_reads_what_it_logs():
    with start("text") as process:
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def test_a_process_goes_on_though_its_log_has_been_closed():
    with start("text") as process:
        process.stderr.close()
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def test_a_full_disk_costs_the_lines_that_do_not_fit():
    with open("/dev/full", "wb") as full, start("text", full) as process:
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
