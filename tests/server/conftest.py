"""The tokenizer and one server for all tests that do not end it."""

import pytest
from engine.fake_client import echo
from server.serving import byte_tokenizer, running


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


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
