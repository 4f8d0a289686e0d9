"""A pytest plugin that reports each test's processor time: wall time says little on a machine that does other work.

`python -m pytest -p processor_time [--processor-times FILE]`, also with `-n`. It counts what the process and its
children that have ended by then used in setup, call and teardown; a fixture's time is that of its first test.
"""

import collections
import os

import pytest

LISTED = 40
"""Number of files, and of tests, in the summary."""


def pytest_addoption(parser):
    parser.addoption("--processor-times", metavar="FILE", help="write each test's processor seconds to this file, too")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the process that prints the summary writes the file
        config.pluginmanager.register(_Report(config.getoption("--processor-times") or os.devnull))


def _seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.user_properties.append(("begun_at", _seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        begun_at = dict(item.user_properties)["begun_at"]
        report.user_properties.append(("processor_seconds", _seconds() - begun_at))
    return report


class _Report:
    """Collects the times in the process that prints the summary, which with `-n` runs no test itself."""

    def __init__(self, path):
        self.path = path
        self.tests = collections.Counter()
        self.files = collections.Counter()

    def pytest_runtest_logreport(self, report):
        seconds = dict(report.user_properties).get("processor_seconds")
        if report.when != "teardown" or seconds is None:
            return
        self.tests[report.nodeid] = seconds
        self.files[report.nodeid.partition("::")[0]] += seconds
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{seconds:.3f}\t{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section(f"processor seconds: {self.tests.total():.0f}")
        for times in (self.files, self.tests):
            for name, seconds in times.most_common(LISTED):
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")
