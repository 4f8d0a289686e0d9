"""Tokenizers, front ends on scripted engines, and such an engine behind the wire."""

import asyncio
import contextlib
import inspect

import pytest
import tiny_tokenizer
from fake_client import FakeEngineClient, echo
from remote_engine import Engine

from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture
def start():
    """Start a front end on a fake engine that plays the given scripts."""
    with contextlib.ExitStack() as stack:

        def start(tokenizer, play=echo, *, seed=None, default_sampling=None, **options):
            client = FakeEngineClient(play, **options)
            stack.callback(client.close)
            return Frontend(client, tokenizer, seed=seed, default_sampling=default_sampling)

        yield start


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
