"""Where log lines go."""

import io
import logging
import sys

import pytest

from jaxserve import logs


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_go_to_what_standard_error_is_now(monkeypatch, form):
    """A command that runs in a test leaves its handler behind, and the test's standard error is closed then."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure("info", form)
    logging.getLogger("jaxserve.test").info("one")
    logging.getLogger("jaxserve.test").debug("too little")
    assert "one" in first.getvalue()
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    logging.getLogger("jaxserve.test").info("two")
    assert "two" in second.getvalue()
    assert len(second.getvalue().splitlines()) == 1
