"""Tokenizers, front ends on scripted engines, and such an engine behind the wire."""

import contextlib

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
