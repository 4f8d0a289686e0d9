"""The tokenizer and one server for all tests that do not end it."""

import contextlib

import pytest
from engine.fake_client import echo
from server.serving import byte_tokenizer, running
from structured import tiny_model

from jaxserve.config import EngineConfig
from jaxserve.engine.local import LocalEngineClient
from jaxserve.server.parsing.syntax import TOOL_PARSERS


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """The folder of a tiny random model, whose tokenizer has the special tokens of every syntax of tool calls."""
    markers = [marker for name, parser in TOOL_PARSERS.items() if name != "hermes" for marker in parser.markers]
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
    )
    with contextlib.closing(LocalEngineClient.start(config)) as client:
        yield client


@pytest.fixture(scope="session")
def shared_server(tokenizer):
    with running(tokenizer) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """A server whose engine echoes the prompt, or does what the test sets as `play`."""
    shared_server.play = echo
    shared_server.client.refusal = None
    shared_server.client.submitted.clear()
    shared_server.client.aborted.clear()
    return shared_server


@pytest.fixture
def slow_server(tokenizer):
    """A server of its own, whose engine takes so long for a step that each step is seen apart from the next."""
    with running(tokenizer, client_options={"step_seconds": 0.1}) as server:
        yield server
