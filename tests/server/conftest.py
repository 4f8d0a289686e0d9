"""The tokenizer and one server for all tests that do not end it."""

import contextlib
import re
import threading

import pytest
import tiny_model
from fake_client import echo
from serving import byte_tokenizer, running, synchronous
from waiting import PATIENCE, wait_until
from wire_clock import WireClock

from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.config import EngineConfig
from jaxserve.engine.local import LocalEngineClient
from jaxserve.structured.pool import GrammarPool

SPECIAL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""What may be a special token of the marks of calls."""


@pytest.fixture(scope="session", autouse=True)
def patience():
    """Raise the server's limits that only a slow machine reaches, and look often for clients that have gone. A test of
    such a limit sets it itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.server.wire.http.ASK_INTERVAL", 0.05)
        patch.setattr("jaxserve.server.generation.grammars.QUEUE_SECONDS", PATIENCE)
        patch.setattr("jaxserve.structured.pool.JOB_SECONDS", PATIENCE)
        patch.setattr("jaxserve.server.generation.running.QUEUE_TIMEOUT", PATIENCE)
        patch.setattr("jaxserve.server.process.lifecycle.FLUSH_TIMEOUT", PATIENCE)
        patch.setattr("jaxserve.server.routes.responses.WAIT_FOR_CANCEL", PATIENCE)
        patch.setattr("jaxserve.structured.matchers.COMPILE_TIMEOUT", PATIENCE)
        yield


class SharedGrammars(GrammarPool):
    """The grammars of all servers of a test process: starting the two processes that compile them takes longer than
    most tests of a server. They end with the test process.
    """

    def close(self):
        """Leave the processes to the next server."""


@pytest.fixture(scope="session")
def shared_grammars(patience):
    """The processes have the limits of `patience`."""
    pool = SharedGrammars()
    yield pool
    GrammarPool.close(pool)


@pytest.fixture(scope="module", autouse=True)
def grammars(shared_grammars):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.engine.frontend.GrammarPool", lambda: shared_grammars)
        yield


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """The folder of a tiny random model, whose tokenizer has the special tokens of every syntax of tool calls."""
    rows = [row for name, rows in TOOL_PARSERS.items() if name != "hermes" for row in rows]
    markers = sorted({mark for row in rows for text in row.texts for mark in SPECIAL.findall(text)})
    return tiny_model.write(
        tmp_path_factory.mktemp("random"), chat_template=tiny_model.CHAT_TEMPLATE, special_tokens=markers
    )


@pytest.fixture(scope="session")
def random_engine(random_model):
    """The real engine on it: what it writes is up to a grammar."""
    config = EngineConfig(
        model=str(random_model),
        load_format="dummy",
        max_num_seqs=16,
        max_num_batched_tokens=16,
        kv_cache_memory=2**22,
        warmup="none",  # what no test needs is not compiled
    )
    with contextlib.closing(LocalEngineClient.start(config)) as client:
        yield client


@pytest.fixture(scope="session")
def shared_server(tokenizer):
    with running(tokenizer) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """A server whose engine echoes the prompt, or does what the test sets as `play`; nothing runs in it."""
    wait_until(lambda: shared_server.client.num_running == shared_server.server.state.life.num_inside == 0)
    shared_server.play = echo
    shared_server.client.refusal = None
    shared_server.client.submitted.clear()
    shared_server.client.aborted.clear()
    return shared_server


@pytest.fixture
def openai_client(server):
    with synchronous(server) as client:
        yield client


@pytest.fixture
def wire_clock(monkeypatch):
    """The time of the connections to servers that start after it."""
    return WireClock(monkeypatch)


@pytest.fixture
def step_by_step(server):
    """An event for which the server's engine waits after each step."""
    go_on = threading.Event()
    pause, server.client.pause = server.client.pause, lambda: go_on.wait(PATIENCE)
    yield go_on
    go_on.set()
    server.client.pause = pause
